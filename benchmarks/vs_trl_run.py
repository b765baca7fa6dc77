"""One run of `vs_trl.py` or `gpu/vs_trl.py`: trains a model folder with one framework.

    python benchmarks/vs_trl_run.py JOB

JOB is JSON: `framework` (trl or agentrl), `model` and `folder` (of the run), `workload` (fields of
`vs_trl_task.Workload`), `steps`, `seed`, `lr`, and `settings`: for agentrl more of the sections of
its configuration, for TRL more arguments of GRPOConfig.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import vs_trl_task

BETAS, MAX_GRAD_NORM = (0.9, 0.95), 1.0


def train_with_agentrl(job: dict[str, Any]) -> None:
    from agentrl.config import Config
    from agentrl.train.loop import train

    workload = vs_trl_task.current.workload
    sections: dict[str, dict[str, Any]] = {
        "model": {"path": job["model"]},
        "rollout": {
            "batch_size": workload.groups,
            "n_samples_per_prompt": workload.members,
            "max_turns": 1,
            "max_new_tokens": workload.response,
            "max_tokens": workload.prompt + workload.response,
        },
        "train": {
            "max_steps": job["steps"],
            "seed": job["seed"],
            "lr": job["lr"],
            "betas": BETAS,
            "max_grad_norm": MAX_GRAD_NORM,
        },
        "log": {"run_dir": Path(job["folder"]) / "run", "tensorboard": False, "trajectories": 0},
    }
    for name, more in job["settings"].items():
        sections[name] = sections.get(name, {}) | more
    agent = Path(__file__).with_name("vs_trl_agent.py")
    train(Config.model_validate({"agent": agent, **sections}))


def train_with_trl(job: dict[str, Any]) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    task = vs_trl_task.current
    workload = task.workload
    settings = {
        "per_device_train_batch_size": workload.episodes,
        "output_dir": job["folder"],
        "gradient_checkpointing": False,
        "max_steps": job["steps"],
        "seed": job["seed"],
        "learning_rate": job["lr"],
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "weight_decay": 0.0,
        "max_grad_norm": MAX_GRAD_NORM,
        "lr_scheduler_type": "constant",
        "num_generations": workload.members,
        "max_completion_length": workload.response,
        "beta": 0.0,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }

    def scores(completions: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
        return [task.score(*pair) for pair in zip(completions, completion_ids, strict=True)]

    tokenizer, examples = AutoTokenizer.from_pretrained(job["model"]), task.examples("train")
    assert len(tokenizer(examples[0]["prompt"])["input_ids"]) == workload.prompt
    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=scores,
        args=GRPOConfig(**settings | job["settings"]),
        train_dataset=Dataset.from_list(examples),
        processing_class=tokenizer,
    )
    trainer.train()


def main() -> None:
    job = json.loads(sys.argv[1])
    vs_trl_task.current = vs_trl_task.Task(vs_trl_task.Workload(**job["workload"]))
    train = {"trl": train_with_trl, "agentrl": train_with_agentrl}[job["framework"]]
    train(job)


if __name__ == "__main__":
    main()
