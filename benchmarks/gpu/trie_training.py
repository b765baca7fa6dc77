"""The learner's update on a tool-use tree, each shared token once, against separate sequences.

A prompt of 4,096 tokens, 8 samples of 8 turns, 64 sampled tokens a turn of which 32 are dropped
from the history as thinking, 48 of feedback: 64 sequences of 284,160 tokens, 12,672 distinct. Each
way is a whole update of the real learner (ZeRO-3, loss, gradient, AdamW) of a Qwen2.5-1.5B shape in
bfloat16, with liger-kernel's layers unless `--no-liger`; the ways run one after the other on the
same card, and the median of `--repeat` counts.
`grad_rel_error_float32` compares trie and rows in float32; `bfloat16_error` is how far each way's
bfloat16 gradient is from the rows' in float32.

    python benchmarks/gpu/trie_training.py [--json]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.utils import safe_get_full_grad
from numpy.typing import NDArray
from shapes import build_model, card
from torch import Tensor

from agentrl.config import Config
from agentrl.train.batch import Sample
from agentrl.train.learner import Learner
from agentrl.train.scorer import policy_names

SHAPE = "qwen2.5-1.5b"
PROMPT, MEMBERS, TURNS, SAMPLED, THINKING, FEEDBACK = 4096, 8, 8, 64, 32, 48
WAYS = {"trie": 16384, "padded": 20480, "packed": 20480}
"""How micro-batches are laid out, and their most tokens: four or five of the rows at a time."""
GRADIENT_LAYERS = 8
"""Float32 gradients are compared on a model with fewer layers, for want of memory."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one way, medians: seconds of an update and its peak of memory in GiB."""

    seconds: float
    all_seconds: list[float]
    peak_gib: float
    tokens_computed: int


def tool_use() -> list[Sample]:
    """One sequence for every turn, since the history before it was rewritten."""
    rng = np.random.default_rng(0)

    def draw(count: int) -> NDArray[np.int64]:
        return rng.integers(0, 150_000, count)

    prompt = draw(PROMPT)
    samples = []
    weight = 1 / (MEMBERS * TURNS * SAMPLED)
    for member in range(MEMBERS):
        history = prompt
        for _ in range(TURNS):
            turn = draw(SAMPLED)
            tokens = np.append(history, turn).astype(np.int32)
            positions = np.arange(len(history), len(tokens), dtype=np.int32)
            samples.append(
                Sample(tokens, positions, episode=member).with_fields(
                    advantages=rng.normal(size=SAMPLED), weights=np.full(SAMPLED, weight)
                )
            )
            history = np.concatenate([history, turn[THINKING:], draw(FEEDBACK)])
    return samples


def build(way: str, dtype: str, layers: int | None, liger: bool) -> Learner:
    """A learner that lays its micro-batches out in one way."""
    config = Config.model_validate(
        {
            "agent": Path("benchmark"),
            "model": {"dtype": dtype, "use_liger_kernel": liger},
            "rollout": {"max_tokens": 8192},
            "train": {"prefix_sharing": way, "max_tokens_per_gpu": WAYS[way], "lr": 1e-6},
        }
    )
    return Learner(build_model(SHAPE, dtype=getattr(torch, dtype), layers=layers), config)


def timing(way: str, samples: list[Sample], repeat: int, liger: bool) -> Timing:
    """Time whole updates; the first ones, which compile, do not count."""
    learner = build(way, "bfloat16", None, liger)
    seconds, computed = [], 0.0
    try:
        for i in range(repeat + 2):
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
            began = time.perf_counter()
            sums, _ = learner.forward_backward(samples, learner.config.algo)
            learner.step()
            torch.cuda.synchronize()
            if i >= 2:
                seconds.append(time.perf_counter() - began)
            computed = sums["tokens_computed"]
        peak = torch.cuda.max_memory_allocated() / 2**30
    finally:
        learner.close()
    del learner
    gc.collect()  # DeepSpeed's engine refers to itself
    torch.cuda.empty_cache()
    return Timing(statistics.median(seconds), seconds, peak, int(computed))


def gradient(way: str, dtype: str, samples: list[Sample], liger: bool) -> Tensor:
    """The gradient of the batch over all parameters of the smaller model, float32 on the host."""
    learner = build(way, dtype, GRADIENT_LAYERS, liger)
    try:
        learner.forward_backward(samples, learner.config.algo)
        named = policy_names(learner._worker.scorer)
        parts = [safe_get_full_grad(parameter).float().flatten().cpu() for _, parameter in named]
    finally:
        learner.close()
    del learner, named
    gc.collect()  # DeepSpeed's engine refers to itself
    torch.cuda.empty_cache()
    return torch.cat(parts)


def distance(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference, relative to that of `expected`."""
    return float((found - expected).norm() / expected.norm())


def measure(ways: list[str], repeat: int, liger: bool) -> dict[str, Any]:
    """Everything that is printed."""
    samples = tool_use()
    result: dict[str, Any] = {
        **card(),
        "sequences": len(samples),
        "tokens_given": sum(sample.num_inputs for sample in samples),
    }
    exact = gradient("padded", "float32", samples, liger)
    result["grad_rel_error_float32"] = distance(gradient("trie", "float32", samples, liger), exact)
    errors = {way: distance(gradient(way, "bfloat16", samples, liger), exact) for way in ways}
    timings = {way: timing(way, samples, repeat, liger) for way in ways}
    for way, timed in timings.items():
        result[way] = {
            "seconds": timed.seconds,
            "all_seconds": timed.all_seconds,
            "peak_gib": timed.peak_gib,
            "tokens_computed": timed.tokens_computed,
            "bfloat16_error": errors[way],
            "trie_speedup": timed.seconds / timings["trie"].seconds,
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--repeat", type=int, default=5, help="updates of each; the median counts")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--liger", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    result = measure(arguments.ways, arguments.repeat, arguments.liger)
    print(f"{result['card']}, torch {result['torch']}, {SHAPE} bfloat16")
    print(f"{'':8}{'seconds':>10}{'computed':>10}{'GiB':>8}{'error':>10}{'trie speedup':>14}")
    for way in arguments.ways:
        row = result[way]
        print(
            f"{way:8}{row['seconds']:>10.3f}{row['tokens_computed']:>10}{row['peak_gib']:>8.1f}"
            f"{row['bfloat16_error']:>10.1e}{row['trie_speedup']:>14.1f}"
        )
    print(f"float32 gradients differ by {result['grad_rel_error_float32']:.1e}")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
