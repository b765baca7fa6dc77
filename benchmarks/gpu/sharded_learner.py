"""The learner's update under ZeRO-3 on as many ranks as there are: what it computes, and how fast.

`two_gpus.py` starts it on one GPU and on two, and compares. Each case makes the same updates from
the same weights: losses, norms of gradients, a sample of the weights afterwards and how far they
moved; tokens per second, arithmetic, and the most memory that rank 0 held. It touches no GPU before
it is its turn (`wait_for_turn`).

    python benchmarks/gpu/sharded_learner.py --out FILE < /dev/null \\
        '{"name": "1.5b", "shape": "qwen2.5-1.5b"}'
    torchrun --nproc-per-node 2 benchmarks/gpu/sharded_learner.py --out FILE CASE... < /dev/null
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401  # the learner would import it in its turn
import numpy as np
import torch
from shapes import build_model
from split_placement import wait_for_turn

from agentrl.config import Config
from agentrl.train.batch import Sample
from agentrl.train.distributed import is_main_process
from agentrl.train.learner import Learner

KEPT = 4096
"""Elements of each parameter that are kept to be compared."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model, the batch of one update, and how many updates."""

    name: str
    shape: str
    dtype: str = "bfloat16"
    layers: int | None = None
    sequences: int = 8
    length: int = 2048
    steps: int = 5
    gradient_checkpointing: bool = False
    fits_one: bool = True
    """Whether it is tried on one GPU."""
    lr: float = 1e-5


def make_config(case: Case) -> Config:
    """All sequences go through in one pass on one rank, and in one on each of two."""
    return Config.model_validate(
        {
            "agent": Path("benchmark"),
            "model": {"dtype": case.dtype},
            "rollout": {"max_tokens": case.length, "max_new_tokens": case.length},
            "train": {
                "lr": case.lr,
                "max_tokens_per_gpu": case.sequences * case.length,
                "gradient_checkpointing": case.gradient_checkpointing,
            },
        }
    )


def samples(case: Case, vocab_size: int) -> list[Sample]:
    """Sequences that share nothing; the second half of each was sampled. The advantages' mean is 1,
    so that the loss is not a small difference of large sums."""
    rng = np.random.default_rng(0)
    positions = np.arange(case.length // 2, case.length, dtype=np.int32)
    weight = 1 / (case.sequences * len(positions))
    return [
        Sample(rng.integers(0, vocab_size, case.length).astype(np.int32), positions).with_fields(
            advantages=rng.normal(1.0, size=len(positions)), weights=np.full(len(positions), weight)
        )
        for _ in range(case.sequences)
    ]


def kept_weights(learner: Learner) -> dict[str, list[float]]:
    """The first elements of each parameter."""
    return {
        name: weight.flatten()[:KEPT].double().cpu().tolist()
        for name, weight in learner.named_weights()
    }


def drive(learner: Learner, case: Case) -> dict[str, Any]:
    """Make the updates; on rank 0."""
    batch = samples(case, learner.policy_config.vocab_size)
    old = learner.logprobs(batch)
    batch = [s.with_fields(old_logprobs=o) for s, o in zip(batch, old, strict=True)]
    before = kept_weights(learner)
    found: dict[str, Any] = {"losses": [], "grad_norms": []}
    seconds, flops = [], 0.0
    for _ in range(case.steps):
        began = _now()
        sums, _ = learner.forward_backward(batch, learner.config.algo)
        outcome = learner.step()
        seconds.append(_now() - began)
        flops = sums["flops"]
        found["losses"].append(sums["loss"])
        found["grad_norms"].append(outcome.grad_norm)
    found["seconds"] = statistics.median(seconds[2:] or seconds)
    found["tokens_per_second"] = case.sequences * case.length / found["seconds"]
    found["tflops"] = flops / found["seconds"] / 1e12
    if torch.cuda.is_available():
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return {**found, "before": before, "after": kept_weights(learner)}


def run(case: Case) -> dict[str, Any] | None:
    """One case on this rank; what rank 0 found, `out_of_memory` where one GPU is too small."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1 and not case.fits_one:
        return {"left_out": True}
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.ExitStack() as stack:
        try:
            dtype = getattr(torch, case.dtype)
            model = build_model(case.shape, dtype=dtype, device=device, layers=case.layers)
            learner = Learner(model, make_config(case))
            del model
            if not is_main_process():
                learner.follow()
                return None
            stack.callback(learner.close)
            return drive(learner, case)
        except torch.OutOfMemoryError:
            if world_size > 1:
                raise
            return {"out_of_memory": True}


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="+", help="JSON with fields of Case")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    wait_for_turn(arguments.out)
    found = {}
    for text in arguments.cases:
        case = Case(**json.loads(text))
        found[case.name] = run(case)
        gc.collect()  # DeepSpeed's engine refers to itself
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if is_main_process():
        arguments.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
