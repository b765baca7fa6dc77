"""A ZeRO-3 learner and its engines on the same GPUs, which they take turns on.

    torchrun --nproc-per-node 2 benchmarks/gpu/colocated_ranks.py --engine vllm --out F < /dev/null

In two arrangements: an engine on each rank's GPU, and one engine on all of them (tensor parallel).
Both are started together, which takes the longest; then they sleep, with the learner on the host,
until it is this script's turn (`wait_for_turn`), and take their turns one after the other. Weights
travel by `engine.transport` ipc, engines sleep at level 2. Every turn: the weights wake and are
replaced, the learner goes to the host, the cache wakes, the engines sample, sleep, and the learner
comes back and makes an update. Seconds and memory of every GPU by phase; and whether each engine's
log-probabilities are the learner's, after the first turn and after the last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from servers import OPTIONS, server_config
from shapes import build_model
from split_placement import QUICK_START, wait_for_turn
from updates import make_peaked

from agentrl.config import Config
from agentrl.engines.factory import make_engine
from agentrl.engines.pool import EnginePool
from agentrl.train.batch import Sample
from agentrl.train.distributed import is_main_process
from agentrl.train.learner import Learner
from agentrl.types import SamplingParams

PROMPT_TOKENS, NEW_TOKENS, LENGTH = 64, 64, 2048
GIB = 2**30
SHARE: dict[str, dict[str, Any]] = {
    # Measured, memory that others give back while a server starts would be taken for its own.
    # What SGLang's share leaves of the memory that was free at its start must stay free.
    "vllm": {"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 40 * GIB},
    "sglang": {"mem_fraction_static": 0.9, "max_total_tokens": 1_400_000},
}


class Turns:
    """The phases, on rank 0: runs each, and notes seconds and the memory of every GPU after it."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.used_gib: dict[str, list[float]] = {}

    async def phase(self, name: str, call: Callable[[], Any]) -> Any:
        """Run a plain or asynchronous call as the phase `name`."""
        began = time.perf_counter()
        result = call()
        if isinstance(result, Awaitable):
            result = await result
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)
        self.used_gib[name] = [
            (total - free) / GIB
            for free, total in map(torch.cuda.mem_get_info, range(torch.cuda.device_count()))
        ]
        return result

    def found(self) -> dict[str, Any]:
        """The median of the seconds of each phase, and the memory after its last time."""
        medians = {name: statistics.median(seconds) for name, seconds in self.seconds.items()}
        return {"seconds": medians, "used_gib": self.used_gib}


async def episodes(
    pool: EnginePool, vocab_size: int, prompts: int, seed: int
) -> list[list[Sample]]:
    """What each engine samples after prompts of its own, with its log-probabilities."""
    rng = np.random.default_rng(seed)
    params = SamplingParams(NEW_TOKENS, min_new_tokens=NEW_TOKENS)
    positions = np.arange(PROMPT_TOKENS, PROMPT_TOKENS + NEW_TOKENS, dtype=np.int32)

    async def one(engine: Any) -> Sample:
        prompt = rng.integers(0, vocab_size, PROMPT_TOKENS).tolist()
        said = await engine.generate(prompt, params)
        ids = np.array([*prompt, *said.token_ids.tolist()], np.int32)
        return Sample(ids, positions).with_fields(sampler_logprobs=said.logprobs)

    return [
        list(await asyncio.gather(*(one(engine) for _ in range(prompts))))
        for engine in pool.engines
    ]


def distance(learner: Learner, sampled: list[list[Sample]]) -> list[float]:
    """Mean |engine - learner| of the log-probabilities, engine by engine."""
    found = []
    for samples in sampled:
        own = np.concatenate(learner.logprobs(samples))
        theirs = np.concatenate(
            [s.sampler_logprobs for s in samples if s.sampler_logprobs is not None]
        )
        found.append(float(np.abs(own - theirs).mean()))
    return found


def batch_of(vocab_size: int, sequences: int) -> list[Sample]:
    """What the learner trains on in its turn."""
    rng = np.random.default_rng(0)
    positions = np.arange(LENGTH // 2, LENGTH, dtype=np.int32)
    return [
        Sample(rng.integers(0, vocab_size, LENGTH).astype(np.int32), positions).with_fields(
            advantages=rng.normal(size=len(positions)),
            weights=np.full(len(positions), 1 / (sequences * len(positions))),
        )
        for _ in range(sequences)
    ]


async def drive(
    learner: Learner, configs: dict[str, Config], folder: Path, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Start all engines, then take turns with each arrangement, on rank 0."""
    pools: dict[str, EnginePool] = {}
    for name, config in configs.items():
        model_folder = Path(config.model.path)
        pool = make_engine(config, run_dir=folder / name, model_folder=model_folder)
        assert isinstance(pool, EnginePool), "servers come as a pool"
        pools[name] = pool
    start = Turns()

    async def start_pools() -> None:
        async with asyncio.TaskGroup() as starting:
            for pool in pools.values():
                starting.create_task(pool.start())

    async def sleep() -> None:
        for pool in pools.values():
            await pool.sleep(2)

    found: dict[str, Any] = {}
    try:
        await start.phase("learner alone", lambda: None)
        await start.phase("learner to the host", learner.offload)
        await start.phase("start", start_pools)
        await start.phase("sleep", sleep)
        await asyncio.to_thread(wait_for_turn, arguments.out)
        await start.phase("learner back", learner.reload)
        found["start"] = start.found()
        for name, pool in pools.items():
            found[name] = await take_turns(learner, pool, configs[name], arguments)
    finally:
        await asyncio.gather(*(pool.close() for pool in pools.values()))
    return found


async def take_turns(
    learner: Learner, pool: EnginePool, config: Config, arguments: argparse.Namespace
) -> dict[str, Any]:
    """From where the engines sleep and the learner has the GPUs, to the same."""
    turns, vocab_size = Turns(), learner.policy_config.vocab_size
    batch = batch_of(vocab_size, arguments.sequences)
    distances: list[list[float]] = []

    def update() -> None:
        learner.forward_backward(batch, config.algo)
        learner.step()

    for turn in range(arguments.rounds + 1):
        await turns.phase("wake the weights", lambda: pool.wake(("weights",)))
        source = learner.weight_source(turn + 1)
        await turns.phase("replace the weights", partial(pool.update_weights, source))
        await turns.phase("learner to the host", learner.offload)
        await turns.phase("wake the cache", lambda: pool.wake(("kv_cache",)))
        sample = partial(episodes, pool, vocab_size, arguments.prompts, turn)
        sampled = await turns.phase("sample", sample)
        await turns.phase("sleep", lambda: pool.sleep(2))
        await turns.phase("learner back", learner.reload)
        distances.append(distance(learner, sampled))
        await turns.phase("update", update)
    return turns.found() | {
        "logprob_difference": {"first": distances[0], "last": distances[-1]},
    }


def engine_section(arguments: argparse.Namespace, *, together: bool) -> dict[str, Any]:
    """An engine for each GPU, or one for all."""
    count = torch.cuda.device_count() or 2
    options = {
        k: v
        for k, v in OPTIONS[arguments.engine].items()
        if k not in ("compilation_config", "cuda_graph_bs_decode")
    }
    section: dict[str, Any] = {
        "python": arguments.python,
        "max_num_seqs": 256,
        "max_model_len": 2048,
        "bucket_mb": arguments.bucket_mb,
        "enable_sleep": True,
        "sleep_level": 2,
        "env": arguments.env,
        "extra": {},
    }
    if torch.cuda.is_available():
        section |= {"gpus": list(range(count)), "transport": "ipc"}
        section["extra"] = options | QUICK_START[arguments.engine] | SHARE[arguments.engine]
    elif together:
        section["transport"] = (
            "disk"  # the fake server of the tests is one rank, whatever it is told
        )
    return section | {"tensor_parallel_size" if together else "num_engines": count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("vllm", "sglang"), required=True)
    parser.add_argument("--shape", default="qwen2.5-1.5b")
    parser.add_argument("--python", type=Path)
    parser.add_argument("--bucket-mb", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=16, help="an engine samples after, a turn")
    parser.add_argument("--sequences", type=int, default=8, help="of 2,048 tokens in an update")
    parser.add_argument("--env", type=json.loads, default={}, help="JSON: engine.env")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as name:
        rollout = {"max_tokens": 2048, "max_new_tokens": LENGTH}
        configs = {
            arrangement: server_config(
                arguments.engine,
                arguments.shape,
                Path(name),
                engine=engine_section(arguments, together=together),
                rollout=rollout,
            )
            for arrangement, together in (("apart", False), ("tensor parallel", True))
        }
        config = configs["apart"]
        model = build_model(arguments.shape, device=device)
        make_peaked(model)
        if is_main_process() and not torch.cuda.is_available():
            model.save_pretrained(config.model.path)  # on a CPU servers start with weights
        learner = Learner(model, config)
        del model
        try:
            if is_main_process():
                found = asyncio.run(drive(learner, configs, Path(name), arguments))
                arguments.out.write_text(json.dumps(found))
            else:
                learner.follow()
        finally:
            if is_main_process():
                learner.close()


if __name__ == "__main__":
    main()
