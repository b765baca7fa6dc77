"""A learner on GPU 0, a server on GPU 1: weights by `engine.transport` nccl, model by model.

`two_gpus.py` starts it. For each shape: seconds of an update while the server has nothing to do and
with requests in flight (`pause`: what those wait for); then whether the server says what the model
on GPU 0 says: the share of greedy tokens that are the model's own first choice, and the mean
absolute difference of log-probabilities. Servers start together, one after another is measured,
once it is this script's turn (`wait_for_turn`). Without a GPU gloo carries the weights. With one
GPU both sides are on it (`own_host`), to try whether updates arrive: its seconds mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from servers import OPTIONS, server_config
from shapes import build_model
from updates import DEVICE, greedy_agreement, logprob_difference, make_peaked, timed

from agentrl.config import Config
from agentrl.engines.base import Engine, WeightSource
from agentrl.engines.factory import make_engine
from agentrl.types import SamplingParams

LONG_PROMPT, LONG_ANSWER = 512, 512
GPU_SHARE: dict[str, dict[str, Any]] = {
    # Measured, the memory of one server would be mistaken for another's: they start together.
    # What SGLang's share leaves of the memory that was free at its start must stay free.
    "vllm": {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 6 << 30},
    "sglang": {"mem_fraction_static": 0.9, "max_total_tokens": 96 << 10},
}
QUICK_START = {"vllm": {"enforce_eager": True}, "sglang": {"disable_cuda_graph": True}}
"""How fast a server samples is not measured here, so that it need not be prepared for that."""
START_TIMEOUT = 300.0
"""Seconds after which the other parts go on without a server that does not start."""
WAITS = ".waits"
"""How the name of the file ends by which a script says that it waits for its turn."""


def wait_for_turn(out: Path) -> None:
    """Say with a file beside `out` that all is prepared, and wait until standard input ends."""
    out.with_suffix(WAITS).touch()
    sys.stdin.read()


def own_host(name: str) -> dict[str, str]:
    """Variables of a process on the only GPU: to NCCL, which takes one rank of a host there, it is
    a host of its own. None where there are two."""
    return {"NCCL_HOSTID": name} if torch.cuda.device_count() == 1 else {}


def config_for(arguments: argparse.Namespace, shape: str, folder: Path) -> Config:
    """A server of one shape on the second GPU, or on the only one."""
    engine: dict[str, Any] = {
        "python": arguments.python,
        "max_num_seqs": 256,
        "max_model_len": 2048,
        "transport": "gloo",
        "bucket_mb": arguments.bucket_mb,
        "env": own_host("server"),
        "pause_mode": "abort",
        "extra": {},
    }
    if torch.cuda.is_available():
        options = {
            k: v
            for k, v in OPTIONS[arguments.engine].items()
            if k not in ("compilation_config", "cuda_graph_bs_decode")
        }
        gpu = min(1, torch.cuda.device_count() - 1)
        engine |= {"gpus": [gpu], "transport": "nccl", "start_timeout": START_TIMEOUT}
        engine["extra"] = options | GPU_SHARE[arguments.engine] | QUICK_START[arguments.engine]
    return server_config(arguments.engine, shape, folder, engine=engine)


async def update_in_flight(engine: Engine, source: WeightSource, count: int) -> dict[str, float]:
    """Seconds of an update that meets so many requests, and how many of those it ended early."""
    rng = np.random.default_rng(8)
    params = SamplingParams(LONG_ANSWER, min_new_tokens=LONG_ANSWER, logprobs=False)
    prompts = [rng.integers(0, 150_000, LONG_PROMPT).tolist() for _ in range(count)]
    requests = [asyncio.create_task(engine.generate(prompt, params)) for prompt in prompts]
    await asyncio.sleep(2.0)  # until all of them are being answered
    seconds = await timed(lambda: engine.update_weights(source))
    answers = await asyncio.gather(*requests)
    ended = sum(answer.finish_reason == "abort" for answer in answers)
    return {"pause": seconds, "ended_early": float(ended)}


async def measure(engine: Engine, shape: str, *, repeat: int, in_flight: int) -> dict[str, Any]:
    """Update one server, which runs, from a model of the same shape on GPU 0."""
    model = build_model(shape, device=DEVICE).eval().requires_grad_(False)
    make_peaked(model)
    versions = iter(range(1, 1000))

    def source() -> WeightSource:
        return WeightSource(model.named_parameters, next(versions), live=True)

    found: dict[str, Any] = {
        "bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "first_update": await timed(lambda: engine.update_weights(source())),
    }
    found["updates"] = [await timed(lambda: engine.update_weights(source())) for _ in range(repeat)]
    found["update"] = statistics.median(found["updates"])
    found |= await update_in_flight(engine, source(), in_flight)
    found |= await greedy_agreement(engine, model)
    found["logprob_difference"] = await logprob_difference(engine, model, seed=3)
    return found


async def measure_all(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start a server for each shape, then measure one after another."""
    engines: dict[str, Engine] = {}
    for shape in arguments.shapes:
        config = config_for(arguments, shape, folder / shape)
        if not torch.cuda.is_available():  # there servers start with weights
            build_model(shape, device=DEVICE).save_pretrained(config.model.path)
        engines[shape] = make_engine(
            config, run_dir=folder / shape, model_folder=Path(config.model.path)
        )
    found = {}
    try:
        async with asyncio.TaskGroup() as starting:
            for engine in engines.values():
                starting.create_task(engine.start())
        await asyncio.to_thread(wait_for_turn, arguments.out)
        for shape, engine in engines.items():
            found[shape] = await measure(
                engine, shape, repeat=arguments.repeat, in_flight=arguments.in_flight
            )
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    finally:
        await asyncio.gather(*(engine.close() for engine in engines.values()))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("vllm", "sglang"), required=True)
    parser.add_argument("--shapes", nargs="+", required=True)
    parser.add_argument("--python", type=Path)
    parser.add_argument("--bucket-mb", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--in-flight", type=int, default=64, help="requests that an update meets")
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    arguments = parser.parse_args()
    os.environ.update(own_host("learner"))
    with tempfile.TemporaryDirectory() as name:
        found = asyncio.run(measure_all(arguments, Path(name)))
    arguments.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
