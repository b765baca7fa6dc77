"""One run of `vs_trl.py`: trains a model folder with one framework, prints its steps as JSON.

python benchmarks/vs_trl_run.py trl|agentrl MODEL STEPS SEED
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import vs_trl_task as task

LR, BETAS, MAX_GRAD_NORM = 3e-3, (0.9, 0.95), 1.0


def train_with_agentrl(model: str, steps: int, seed: int) -> None:
    from agentrl.config import Config
    from agentrl.train.loop import train

    with tempfile.TemporaryDirectory() as folder:
        train(
            Config(
                agent=Path(__file__).with_name("vs_trl_agent.py"),
                model={"path": model},
                rollout={
                    "batch_size": task.GROUPS,
                    "n_samples_per_prompt": task.MEMBERS,
                    "max_turns": 1,
                    "max_new_tokens": task.RESPONSE,
                    "max_tokens": task.PROMPT + task.RESPONSE,
                },
                train={
                    "max_steps": steps,
                    "seed": seed,
                    "lr": LR,
                    "betas": BETAS,
                    "max_grad_norm": MAX_GRAD_NORM,
                    "max_tokens_per_gpu": 32768,
                },
                log={"run_dir": Path(folder) / "run", "tensorboard": False, "trajectories": 0},
            )
        )


def train_with_trl(model: str, steps: int, seed: int) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            max_steps=steps,
            seed=seed,
            learning_rate=LR,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            weight_decay=0.0,
            max_grad_norm=MAX_GRAD_NORM,
            lr_scheduler_type="constant",
            per_device_train_batch_size=task.GROUPS * task.MEMBERS,
            num_generations=task.MEMBERS,
            max_completion_length=task.RESPONSE,
            generation_kwargs={"min_new_tokens": task.RESPONSE},
            beta=0.0,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=_scores,
            args=arguments,
            train_dataset=Dataset.from_list(task.examples("train")),
            processing_class=AutoTokenizer.from_pretrained(model),
        )
        trainer.train()


def _scores(completions: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
    assert all(len(ids) == task.RESPONSE for ids in completion_ids)
    return [task.score(completion) for completion in completions]


def main() -> None:
    framework, model, steps, seed = sys.argv[1:]
    train = {"trl": train_with_trl, "agentrl": train_with_agentrl}[framework]
    train(model, int(steps), int(seed))
    print(json.dumps({"clock": task.clock, "rewards": task.rewards}))


if __name__ == "__main__":
    main()
