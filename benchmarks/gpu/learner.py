"""Tokens per second and model FLOPs utilisation of the learner's update.

One sequence of 16,384 tokens of which nearly all are sampled, so that head and loss are at their
dearest; a whole update: forward, backward, clipping, AdamW under ZeRO-3 on one GPU, bfloat16 with
float32 master weights; liger-kernel's layers unless `--no-liger`. The median of `--repeat` updates
counts. `qwen2.5-7b-lora` trains factors of rank 64 beside frozen weights, with gradient
checkpointing.

Floating-point operations are those that the mathematics needs: 6 for each weight of a matrix
product and token (the head's included, the embedding's lookup not), 4 for one that is frozen, and
6 * T^2 * heads * head size a layer for causal attention. What gradient checkpointing computes again
is not counted.

    python benchmarks/gpu/learner.py [--shapes qwen3-0.6b qwen2.5-1.5b qwen2.5-7b-lora] [--json]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shapes import build_model, card
from transformers import PretrainedConfig

from agentrl.config import Config
from agentrl.train.batch import Sample
from agentrl.train.learner import Learner

TOKENS, PROMPT = 16384, 64
LORA = "-lora"
"""Ends the name of a shape whose weights are frozen."""
LORA_RANK = 64
PEAK = 989e12
"""Dense bfloat16 operations per second of an H100 or H200 (SXM), by NVIDIA's data sheet."""


def samples() -> list[Sample]:
    """One long sequence."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 150_000, TOKENS + 1).astype(np.int32)
    positions = np.arange(PROMPT, TOKENS + 1, dtype=np.int32)
    count = len(positions)
    return [
        Sample(tokens, positions).with_fields(
            advantages=rng.normal(size=count), weights=np.full(count, 1 / count)
        )
    ]


def needed_operations(config: PretrainedConfig, weights: int, factors: int) -> float:
    """Floating-point operations of one update; see the top of the file.

    Args:
        config: the model's.
        weights: how many it has.
        factors: how many low-rank ones train in their place; 0: all weights train.
    """
    embedding = config.vocab_size * config.hidden_size
    matrix_weights = weights if config.tie_word_embeddings else weights - embedding
    head_size = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    attention = 6 * TOKENS**2 * config.num_attention_heads * head_size * config.num_hidden_layers
    each = 4 if factors else 6
    return float((each * matrix_weights + 6 * factors) * TOKENS + attention)


def measure(
    name: str, sharing: str, *, liger: bool, checkpointing: bool, repeat: int
) -> dict[str, Any]:
    """Time updates of one shape."""
    lora = name.endswith(LORA)
    config = Config.model_validate(
        {
            "agent": Path("benchmark"),
            "model": {
                "dtype": "bfloat16",
                "use_liger_kernel": liger,
                "lora": {"rank": LORA_RANK if lora else 0},
            },
            "rollout": {"max_tokens": TOKENS, "max_new_tokens": TOKENS},
            "train": {
                "prefix_sharing": sharing,
                "max_tokens_per_gpu": TOKENS,
                "gradient_checkpointing": checkpointing or lora,
            },
        }
    )
    model = build_model(name.removesuffix(LORA))
    shape, weights = model.config, model.num_parameters()
    learner, batch, seconds = Learner(model, config), samples(), []
    factors = sum(p.ds_numel for p in learner._worker.scorer.parameters() if p.requires_grad)
    operations = needed_operations(shape, weights, factors if lora else 0)
    del model
    try:
        for i in range(repeat + 2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            learner.forward_backward(batch, config.algo)
            learner.step()
            torch.cuda.synchronize()
            if i >= 2:
                seconds.append(time.perf_counter() - began)
        peak_gib = torch.cuda.max_memory_allocated() / 2**30
    finally:
        learner.close()
    del learner
    gc.collect()  # DeepSpeed's engine refers to itself
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    median = statistics.median(seconds)
    return {
        "seconds": median,
        "all_seconds": seconds,
        "tokens_per_second": TOKENS / median,
        "mfu": operations / median / PEAK,
        "peak_gib": peak_gib,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--repeat", type=int, default=5, help="updates; the median counts")
    parser.add_argument(
        "--shapes", nargs="+", default=["qwen3-0.6b", "qwen2.5-1.5b", "qwen2.5-7b" + LORA]
    )
    parser.add_argument("--sharing", nargs="+", default=["trie", "padded"])
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--liger", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    result: dict[str, Any] = {**card(), "tokens": TOKENS}
    print(f"{'':24}{'seconds':>10}{'tokens/s':>12}{'MFU':>8}{'GiB':>8}")
    for shape in arguments.shapes:
        for sharing in arguments.sharing:
            row = measure(
                shape,
                sharing,
                liger=arguments.liger,
                checkpointing=arguments.gradient_checkpointing,
                repeat=arguments.repeat,
            )
            result.setdefault(shape, {})[sharing] = row
            print(
                f"{shape + ' ' + sharing:24}{row['seconds']:>10.3f}"
                f"{row['tokens_per_second']:>12,.0f}{row['mfu']:>8.1%}{row['peak_gib']:>8.1f}",
                flush=True,
            )
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
