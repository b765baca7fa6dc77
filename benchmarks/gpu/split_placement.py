"""A learner on GPU 0, a server on GPU 1: weights by `engine.transport` nccl, model by model.

`two_gpus.py` starts it. For each shape: seconds of an update while the server has nothing to do and
with requests in flight (`pause`: what those wait for); then whether the server says what the model
on GPU 0 says: the share of greedy tokens that are the model's own first choice, and the mean
absolute difference of log-probabilities. Servers start together, one after another is measured,
once it is this script's turn (`wait_for_turn`). Without a GPU gloo carries the weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from servers import OPTIONS, server_config
from shapes import build_model
from torch import Tensor
from transformers import PreTrainedModel
from weights import make_peaked

from agentrl.config import Config
from agentrl.engines.base import Engine, WeightSource
from agentrl.engines.factory import make_engine
from agentrl.types import Generation, SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPT_TOKENS, NEW_TOKENS, PROMPTS = 64, 24, 8
LONG_PROMPT, LONG_ANSWER = 512, 512
CLEAR = 1.0
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


def config_for(arguments: argparse.Namespace, shape: str, folder: Path) -> Config:
    """A server of one shape on the second GPU."""
    engine: dict[str, Any] = {
        "python": arguments.python,
        "max_num_seqs": 256,
        "max_model_len": 2048,
        "transport": "gloo",
        "bucket_mb": arguments.bucket_mb,
        "pause_mode": "abort",
        "extra": {},
    }
    if torch.cuda.is_available():
        options = {
            k: v
            for k, v in OPTIONS[arguments.engine].items()
            if k not in ("compilation_config", "cuda_graph_bs_decode")
        }
        engine |= {"gpus": [1], "transport": "nccl", "start_timeout": START_TIMEOUT}
        engine["extra"] = options | GPU_SHARE[arguments.engine] | QUICK_START[arguments.engine]
    return server_config(arguments.engine, shape, folder, engine=engine)


async def timed(call: Callable[[], Awaitable[object]]) -> float:
    """Seconds of one call, with what the GPU was asked to do."""
    torch.get_device_module(DEVICE).synchronize()
    began = time.perf_counter()
    await call()
    torch.get_device_module(DEVICE).synchronize()
    return time.perf_counter() - began


async def answers(
    engine: Engine, model: PreTrainedModel, params: SamplingParams, seed: int
) -> list[tuple[Generation, Tensor]]:
    """What the engine says after a few prompts, with the model's logits [N, V] for its tokens."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 150_000, PROMPT_TOKENS).tolist() for _ in range(PROMPTS)]
    said = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
    found = []
    for prompt, answer in zip(prompts, said, strict=True):
        ids = torch.tensor([prompt + answer.token_ids.tolist()], device=DEVICE)
        with torch.no_grad():
            found.append((answer, model(ids).logits[0, PROMPT_TOKENS - 1 : -1].float().cpu()))
    return found


async def greedy_agreement(engine: Engine, model: PreTrainedModel) -> dict[str, float]:
    """Share of the engine's greedy tokens that are the model's first choice after the same ids.

    Of all, and of those (`clear_choices`) where the model prefers its first to its second choice by
    more than `CLEAR` nats: the others are near ties, which bfloat16 decides either way.
    """
    params = SamplingParams(NEW_TOKENS, min_new_tokens=NEW_TOKENS, temperature=0, logprobs=False)
    agreed, clear = [], []
    for answer, logits_NV in await answers(engine, model, params, seed=7):
        best = logits_NV.topk(2)
        agreed.append(best.indices[:, 0].numpy() == answer.token_ids)
        clear.append((best.values[:, 0] - best.values[:, 1] > CLEAR).numpy())
    agreed_N, clear_N = np.concatenate(agreed), np.concatenate(clear)
    return {
        "greedy_agreement": float(agreed_N.mean()),
        "clear_choices": float(clear_N.mean()),
        "clear_agreement": float(agreed_N[clear_N].mean()),
    }


async def logprob_difference(engine: Engine, model: PreTrainedModel) -> float:
    """Mean |engine - model| of the log-probabilities of what the engine samples."""
    params = SamplingParams(NEW_TOKENS, min_new_tokens=NEW_TOKENS)
    found = []
    for answer, logits_NV in await answers(engine, model, params, seed=3):
        assert answer.logprobs is not None, "they were asked for"
        ids_N1 = torch.from_numpy(answer.token_ids.astype(np.int64))[:, None]
        own_N = logits_NV.log_softmax(-1).gather(1, ids_N1)[:, 0].numpy()
        found.append(np.abs(own_N - answer.logprobs).mean())
    return float(np.mean(found))


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
    found["logprob_difference"] = await logprob_difference(engine, model)
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
    with tempfile.TemporaryDirectory() as name:
        found = asyncio.run(measure_all(arguments, Path(name)))
    arguments.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
