"""Where the learner's update of `vs_trl.py` spends its time: the GPU's kernels by what they do.

16 prompts of 512 random tokens with 8 samples of 256, as tries, of a Qwen2.5-0.5B shape in bfloat16
with liger-kernel's layers: forward, backward, clipping, AdamW. `seconds` is the median of
`--repeat` updates without the profiler; then the torch profiler watches one more. On a CPU, whose
operators then count, it tries itself out.

    python benchmarks/gpu/update_profile.py [--shape qwen2.5-0.5b] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shapes import SHAPES, build_model, card
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from agentrl.config import Config
from agentrl.train.batch import Sample
from agentrl.train.learner import Learner

sys.path.append(str(Path(__file__).parents[1]))
from vs_trl_task import Workload

WARMING_UP = 3
"""Updates that compile, and do not count."""
KINDS = {
    "FlexAttention": ("flex_attention",),
    "cuDNN's attention": ("cudnn", "fmha"),
    "the head's softmax": ("log_softmax", "scatter_add"),
    "matrix products": ("nvjet", "gemm", "cutlass", "gemv", "splitk"),
    "liger-kernel": ("rms_norm", "swiglu", "rope"),
    "optimizer": ("multi_tensor_apply",),
}
"""What kernels do, by a part of their names; the first that fits counts."""
REST = "copies, sums and others"


def samples(workload: Workload) -> list[Sample]:
    """A batch of random ids."""
    rng = np.random.default_rng(0)
    weight = 1 / (workload.episodes * workload.response)
    positions = np.arange(workload.prompt, workload.prompt + workload.response, dtype=np.int32)
    batch = []
    for group in range(workload.groups):
        prompt = rng.integers(0, 150_000, workload.prompt)
        for member in range(workload.members):
            response = rng.integers(0, 150_000, workload.response)
            tokens = np.append(prompt, response).astype(np.int32)
            batch.append(
                Sample(tokens, positions, episode=group * workload.members + member).with_fields(
                    advantages=rng.normal(size=workload.response),
                    weights=np.full(workload.response, weight),
                )
            )
    return batch


def make_learner(shape: str, workload: Workload, max_tokens: int) -> Learner:
    """On the GPU, if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = Config.model_validate(
        {
            "agent": Path("benchmark"),
            "model": {"dtype": "bfloat16", "use_liger_kernel": device == "cuda"},
            "rollout": {
                "max_tokens": workload.prompt + workload.response,
                "max_new_tokens": workload.response,
            },
            "train": {"max_tokens_per_gpu": max_tokens, "lr": 1e-6},
        }
    )
    return Learner(build_model(shape, device=device), config)


def update(learner: Learner, batch: list[Sample]) -> float:
    """Seconds of one."""
    began = time.perf_counter()
    learner.forward_backward(batch, learner.config.algo)
    learner.step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def kernel_seconds(learner: Learner, batch: list[Sample]) -> Counter[str]:
    """Of one update, by kind; without a GPU of its operators."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        update(learner, batch)
    gpu = torch.cuda.is_available()
    device = DeviceType.CUDA if gpu else DeviceType.CPU
    found: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type == device and not event.is_user_annotation:
            spent = event.self_device_time_total if gpu else event.self_cpu_time_total
            found[kind_of(event.name)] += spent / 1e6
    return found


def kind_of(kernel: str) -> str:
    """What a kernel does."""
    name = kernel.lower()
    for kind, parts in KINDS.items():
        if any(part in name for part in parts):
            return kind
    return REST


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--max-tokens-per-gpu", type=int, default=20480, help="of one pass")
    parser.add_argument("--workload", default="{}", help="JSON with fields of vs_trl_task.Workload")
    parser.add_argument("--repeat", type=int, default=5, help="the median counts")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    workload = Workload(**{"response": 256, "groups": 16} | json.loads(arguments.workload))
    learner = make_learner(arguments.shape, workload, arguments.max_tokens_per_gpu)
    batch = samples(workload)
    try:
        seconds = [update(learner, batch) for _ in range(WARMING_UP + arguments.repeat)][
            WARMING_UP:
        ]
        kernels = kernel_seconds(learner, batch)
    finally:
        learner.close()
    result: dict[str, Any] = {
        **card(),
        "shape": arguments.shape,
        "seconds": statistics.median(seconds),
        "all_seconds": seconds,
        "kernel_seconds": dict(kernels.most_common()),
    }
    print(f"{arguments.shape}, {result['card']}: {result['seconds']:.3f} s an update")
    for kind, spent in kernels.most_common():
        print(f"{kind:26}{spent:>8.3f} s")
    print(f"{'all kernels':26}{kernels.total():>8.3f} s")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
