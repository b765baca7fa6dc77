"""A step of agentrl against a step of TRL's GRPOTrainer: same model, prompts, lengths, cores.

A Llama of 4 layers, 128 wide, with random weights and a token for each character learns to write
digits. A step is 4 prompts of 512 tokens, 8 samples of exactly 64 tokens each, and one optimizer
step with the same settings (GRPO, AdamW, float32). TRL samples with transformers' generate, its
default without a server, and takes all samples in one micro-batch (four of 8 take as long);
recomputing activations, which it does by default, is off.

The frameworks run in turn, each in a process of its own, on the threads that OMP_NUM_THREADS says
(1). A step lasts from the last score of one batch to the last score of the next, as the task itself
sees it; the first one of each run, which warms up, does not count. `step_time_ratio` is the median
step of TRL over that of agentrl; `cpu_time_ratio` the same in time of the processor, which others
on the machine change less. Rewards are means over runs: of the first step, and of the last five.

    python benchmarks/vs_trl.py [--json]

TRL comes with `pip install 'agentrl[bench]'`. Where it is absent, it alone is installed into a
folder of its own (`--trl`), so that no other package changes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")
# What is trained lies on disk: nobody has to ask the hub for it.
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from vs_trl_side import Job, Side, Step, steps_of
from vs_trl_task import Workload

from agentrl.models.tiny import build_tiny_tokenizer

TRL = "trl==1.16.0"
HERE = Path(__file__).parent
WORKLOAD = Workload()
LR = 3e-3
SETTINGS: dict[str, dict[str, Any]] = {
    "trl": {
        "use_cpu": True,
        "bf16": False,
        "generation_kwargs": {"min_new_tokens": WORKLOAD.response},
    },
    "agentrl": {"train": {"max_tokens_per_gpu": 32768}},
}


@dataclass(frozen=True, slots=True)
class Result:
    """What is printed; seconds are medians over the steps of all rounds."""

    step_time_ratio: float
    cpu_time_ratio: float
    trl_step_seconds: float
    agentrl_step_seconds: float
    trl_cpu_seconds: float
    agentrl_cpu_seconds: float
    trl_reward_first: float
    trl_reward_last: float
    agentrl_reward_first: float
    agentrl_reward_last: float
    steps: int
    rounds: int
    parameters: int


def save_model(folder: str) -> int:
    """Write the model that both start from; returns its number of parameters."""
    tokenizer = build_tiny_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=1024,
        bos_token_id=None,
        **ends,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return int(model.num_parameters())


def find_trl(folder: Path) -> None:
    """Make TRL importable in the processes of the runs."""
    if importlib.util.find_spec("trl") is not None:
        return
    if not (folder / "trl").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
        subprocess.run([*pip, "--target", str(folder), TRL], check=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    )


def run(framework: Literal["trl", "agentrl"], model: str, steps: int, seed: int) -> list[Step]:
    """Train in a process of its own and return its steps."""
    with tempfile.TemporaryDirectory() as folder:
        settings = SETTINGS[framework]
        job = Job(
            framework, model, folder, WORKLOAD, steps=steps, lr=LR, seed=seed, settings=settings
        )
        return list(steps_of(job))


def compare(rounds: int, steps: int) -> Result:
    """Run both in turn."""
    sides: dict[Literal["trl", "agentrl"], Side] = {"trl": Side(), "agentrl": Side()}
    with tempfile.TemporaryDirectory() as model:
        parameters = save_model(model)
        for seed in range(rounds):
            for framework, side in sides.items():
                side.add(run(framework, model, steps, seed))
                print(f"round {seed + 1}/{rounds}  {framework:8}"
                      f"{statistics.median(side.wall):8.2f} s a step"
                      f"{statistics.median(side.cpu):8.2f} s of the processor"
                      f"   reward {side.last_rewards[-1]:.3f}", flush=True)  # fmt: skip
    trl, ours = sides["trl"], sides["agentrl"]
    seconds = {name: statistics.median(side.wall) for name, side in sides.items()}
    cpu = {name: statistics.median(side.cpu) for name, side in sides.items()}
    return Result(
        step_time_ratio=seconds["trl"] / seconds["agentrl"],
        cpu_time_ratio=cpu["trl"] / cpu["agentrl"],
        trl_step_seconds=seconds["trl"],
        agentrl_step_seconds=seconds["agentrl"],
        trl_cpu_seconds=cpu["trl"],
        agentrl_cpu_seconds=cpu["agentrl"],
        trl_reward_first=statistics.mean(trl.first_rewards),
        trl_reward_last=statistics.mean(trl.last_rewards),
        agentrl_reward_first=statistics.mean(ours.first_rewards),
        agentrl_reward_last=statistics.mean(ours.last_rewards),
        steps=steps,
        rounds=rounds,
        parameters=parameters,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each framework")
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps of a run")
    parser.add_argument("--trl", type=Path, default=HERE / "build" / "trl", help="where it is put")
    arguments = parser.parse_args()
    find_trl(arguments.trl)
    result = compare(arguments.rounds, arguments.steps)
    print(
        f"TRL {result.trl_step_seconds:.2f} s a step, agentrl {result.agentrl_step_seconds:.2f} s: "
        f"{result.step_time_ratio:.2f} times (of the processor {result.cpu_time_ratio:.2f} times)"
    )
    if arguments.json:
        print(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
