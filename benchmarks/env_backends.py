"""What `rollout.env_backend process` costs, and what it gives environments that compute.

First episodes that do nothing, for the cost of one; then a few whose step computes in Python, which
in threads take turns with one interpreter.

    python benchmarks/env_backends.py [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from agentrl.chat import ChatFormat
from agentrl.config import DataConfig, ModelConfig, RolloutConfig
from agentrl.engines.scripted import ScriptedEngine
from agentrl.executors.groups import GroupRequest
from agentrl.executors.scheduler import RolloutScheduler
from agentrl.models.load import load_tokenizer
from agentrl.plugin import load_agent
from agentrl.types import SamplingParams

AGENT = Path(__file__).with_name("env_backends_agent.py")


@dataclass(frozen=True, slots=True)
class Result:
    """The figures that are printed; `compute_seconds` is the CPU time of all steps together."""

    cores: int
    thread_milliseconds_per_episode: float
    process_milliseconds_per_episode: float
    compute_seconds: float
    thread_wall: float
    process_wall: float
    speedup: float


async def run(backend: str, episodes: int, seconds: float) -> float:
    """Wall time of so many episodes, with the processes ready to be forked."""
    rollout = RolloutConfig(env_backend=backend, max_concurrency=64)
    executor = load_agent(AGENT).make_executor(rollout, DataConfig(), probe=False)
    chat = ChatFormat(load_tokenizer(ModelConfig()))
    scheduler = RolloutScheduler.local(
        executor,
        ScriptedEngine([[min(chat.end_token_ids)]], record=False),
        chat,
        SamplingParams(max_new_tokens=4),
        rollout,
    )

    def requests(prefix: str, count: int, seconds: float) -> list[GroupRequest]:
        example = {"seconds": seconds}
        return [GroupRequest(f"{prefix}-{number}", "e", example, 1) for number in range(count)]

    try:
        await scheduler.run(requests("warm-up", 1, 0.0))
        began = time.perf_counter()
        result = await scheduler.run(requests("measured", episodes, seconds))
        wall = time.perf_counter() - began
    finally:
        await executor.close()
    if result.num_completed != episodes:
        raise RuntimeError(f"only {result.num_completed} of {episodes} episodes completed")
    return wall


def measure(episodes: int, computing: int, seconds: float) -> Result:
    """Run both backends, one after the other."""
    idle = {backend: asyncio.run(run(backend, episodes, 0.0)) for backend in ("thread", "process")}
    busy = {
        backend: asyncio.run(run(backend, computing, seconds)) for backend in ("thread", "process")
    }
    return Result(
        cores=len(os.sched_getaffinity(0)),
        thread_milliseconds_per_episode=1000 * idle["thread"] / episodes,
        process_milliseconds_per_episode=1000 * idle["process"] / episodes,
        compute_seconds=computing * seconds,
        thread_wall=busy["thread"],
        process_wall=busy["process"],
        speedup=busy["thread"] / busy["process"],
    )


def main() -> None:
    """Measure and print a table; with --json one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    parser.add_argument("--episodes", type=int, default=500, help="that do nothing")
    parser.add_argument("--computing", type=int, default=16, help="episodes that compute")
    parser.add_argument("--seconds", type=float, default=0.5, help="that each computes for")
    arguments = parser.parse_args()
    result = asdict(measure(arguments.episodes, arguments.computing, arguments.seconds))
    for name, value in result.items():
        print(f"{name:34}{value:>10,.2f}")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
