"""Weights from a learner to a server on the same GPU, and the colocated cycle around them.

The weights are those of a model with random numbers in this process; a server that agentrl starts
on the same GPU receives them through `engine.transport` ipc. `update` is everything that rollouts
wait for: pause, transfer, forgetting the cache, setting the version, resuming. `bound` copies as
many bytes inside one process. The cycle is sleep level 2, wake the weights, update, wake the cache.
`logprob_difference` compares the engine's log-probabilities with the model's own forward pass
(bfloat16, mean of absolute differences), before the first update and after the last.

    python benchmarks/gpu/weights.py --engine vllm [--shape qwen2.5-7b] [--python PYTHON] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from servers import server_config, versions
from shapes import SHAPES, build_model, card
from transformers import PreTrainedModel
from updates import logprob_difference, make_peaked, timed

from agentrl.config import Config
from agentrl.engines.base import Engine, WeightSource
from agentrl.engines.factory import make_engine

GIB = 2**30
LOADED = 2
"""Updates that go through the engine's loader before the first that is copied."""


def copy_bound(model: PreTrainedModel, repeat: int) -> float:
    """Seconds to copy the weights once on this GPU."""
    source = [parameter.data for parameter in model.parameters()]
    target = [torch.empty_like(tensor) for tensor in source]
    seconds = []
    for _ in range(repeat + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        torch._foreach_copy_(target, source)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    del target
    torch.cuda.empty_cache()
    return statistics.median(seconds[1:])


async def cycle(engine: Engine, update: Callable[[], Awaitable[object]]) -> dict[str, float]:
    """One sleep and waking of a colocated server: seconds, and GiB that the learner gets."""
    free_before = torch.cuda.mem_get_info()[0]
    found = {"sleep": await timed(lambda: engine.sleep(2))}
    found["freed_gib"] = (torch.cuda.mem_get_info()[0] - free_before) / GIB
    found["wake_weights"] = await timed(lambda: engine.wake(("weights",)))
    found["update"] = await timed(update)
    found["wake_cache"] = await timed(lambda: engine.wake(("kv_cache",)))
    parts = ("sleep", "wake_weights", "update", "wake_cache")
    return found | {"total": sum(found[part] for part in parts)}


async def measure(config: Config, folder: Path, shape: str, repeat: int) -> dict[str, Any]:
    """Start the server, move the weights, compare."""
    model = build_model(shape).eval().requires_grad_(False)
    make_peaked(model)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    result: dict[str, Any] = {"gigabytes": size / 1e9, "bound": copy_bound(model, repeat)}
    engine = make_engine(config, run_dir=folder, model_folder=Path(config.model.path))
    numbers = itertools.count(1)

    async def update() -> None:
        source = WeightSource(model.named_parameters, next(numbers), live=True)
        await engine.update_weights(source)

    try:
        await engine.start()
        result["logprob_difference"] = {"before": await logprob_difference(engine, model, 0)}
        result["loaded_updates"] = [await timed(update) for _ in range(LOADED)]
        result["updates"] = [await timed(update) for _ in range(repeat)]
        result["update"] = statistics.median(result["updates"])
        result["logprob_difference"]["after"] = await logprob_difference(engine, model, 1)
        cycles = [await cycle(engine, update) for _ in range(repeat)]
        result["cycle"] = {k: statistics.median(c[k] for c in cycles) for k in cycles[0]}
        result["logprob_difference"]["after_sleep"] = await logprob_difference(engine, model, 2)
    finally:
        await engine.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("vllm", "sglang"), required=True)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-7b")
    parser.add_argument("--python", type=Path, help="Python of the engine's environment")
    parser.add_argument("--bucket-mb", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=5, help="the median counts")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine = {
            "python": arguments.python,
            "max_num_seqs": 256,
            "max_model_len": 2048,
            "transport": "ipc",
            "bucket_mb": arguments.bucket_mb,
            "enable_sleep": True,
            "sleep_level": 2,
        }
        config = server_config(arguments.engine, arguments.shape, folder, engine=engine)
        found = asyncio.run(measure(config, folder, arguments.shape, arguments.repeat))
    result = {
        **card(),
        **versions(arguments.python, [arguments.engine]),
        "engine": arguments.engine,
        "shape": arguments.shape,
        **found,
    }
    print(
        f"{arguments.engine} {result.get(arguments.engine, '(unknown)')}, {arguments.shape}, "
        f"{result['gigabytes']:.1f} GB, {result['card']}"
    )
    print(f"{'copy within one process':26}{result['bound'] * 1e3:>10.1f} ms")
    for seconds in result["loaded_updates"]:
        print(f"{'update through the loader':26}{seconds * 1e3:>10.1f} ms")
    print(f"{'update':26}{result['update'] * 1e3:>10.1f} ms")
    for name, value in result["cycle"].items():
        scaled, unit = (value, "GiB") if name.endswith("gib") else (value * 1e3, "ms")
        print(f"{'cycle: ' + name:26}{scaled:>10.1f} {unit}")
    for when, value in result["logprob_difference"].items():
        print(f"{'difference ' + when:26}{value:>10.4f}")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
