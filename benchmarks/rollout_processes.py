"""What `rollout.num_processes` does for agentrl's own part of a rollout.

256 episodes of 4 turns go to a server that answers at once what it always answers, 0.3 s later, so
that all of them are in flight and nothing but the client has work to do. A round of one process
and one of each other number follow each other; the processor's time is that of agentrl's process
and that of its rollout processes, for each request.

    python benchmarks/rollout_processes.py [--processes 1 2 4] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from agentrl.config import Config
from agentrl.engines.factory import make_engine
from agentrl.engines.pool import EnginePool
from agentrl.engines.server import free_port
from agentrl.executors.attempts import Attempts
from agentrl.executors.build import local_attempts
from agentrl.executors.groups import GroupRequest
from agentrl.executors.scheduler import RolloutScheduler
from agentrl.executors.workers.attempts import ProcessAttempts
from agentrl.models.load import load_policy, load_tokenizer
from agentrl.plugin import load_agent

HERE = Path(__file__).parent
EPISODES, TURNS, PROMPT, TOKENS = 256, 4, 512, 128
SECONDS = 0.3
START_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Result:
    """Medians over rounds; the CPU times are milliseconds for each request."""

    processes: int
    wall_seconds: float
    least_seconds: float
    main_cpu: float
    workers_cpu: float


async def one_round(scheduler: RolloutScheduler, number: str) -> float:
    """Wall time of all episodes."""
    example = {"prompt": PROMPT, "turns": TURNS, "tokens": TOKENS}
    groups = [GroupRequest(f"{number}-{e:04d}", "e", example, 1) for e in range(EPISODES)]
    began = time.perf_counter()
    result = await scheduler.run(groups)
    if result.num_completed < EPISODES:
        raise RuntimeError(f"an episode failed: {result.dropped[0].error}")
    return time.perf_counter() - began


def cpu_seconds(attempts: Attempts) -> tuple[float, float]:
    """Of this process, and of the rollout processes."""
    workers = attempts.workers if isinstance(attempts, ProcessAttempts) else ()
    times = [psutil.Process(worker.pid).cpu_times() for worker in workers]
    return time.process_time(), sum(each.user + each.system for each in times)


async def started(config: Config, pool: EnginePool, processes: int) -> Attempts:
    """What runs attempts in so many processes."""
    attempts: Attempts
    if processes > 1:
        attempts = ProcessAttempts(config, pool, ())
    else:
        executor = load_agent(config.agent).make_executor(config.rollout, config.data)
        attempts = local_attempts(config, executor, pool, load_tokenizer(config.model), ())
    await attempts.start()
    return attempts


async def measure(folder: Path, url: str, numbers: Sequence[int], rounds: int) -> list[Result]:
    """Rounds of all numbers of processes in turn; the first of each does not count."""
    figures: dict[int, list[tuple[float, float, float]]] = {number: [] for number in numbers}
    model = folder / "model"
    async with AsyncExitStack() as stack:
        stages: dict[int, tuple[Attempts, RolloutScheduler]] = {}
        for number in numbers:
            config = Config(
                agent=HERE / "rollout_processes_agent.py",
                engine={"kind": "vllm", "urls": (url,), "transport": "disk"},
                rollout={
                    "num_processes": number,
                    "max_concurrency": EPISODES,
                    "max_tokens": 2 * PROMPT + 2 * TURNS * TOKENS,
                },
            )
            if not model.exists():
                load_policy(config.model, 0).save_pretrained(model)
            pool = make_engine(config, run_dir=folder, model_folder=model)
            assert isinstance(pool, EnginePool)
            stack.push_async_callback(pool.close)
            await pool.start()
            attempts = await started(config, pool, number)
            stack.push_async_callback(attempts.close)
            stages[number] = attempts, RolloutScheduler(attempts, config.rollout)
        for turn in range(rounds + 1):
            for number, (attempts, scheduler) in stages.items():
                before = cpu_seconds(attempts)
                wall = await one_round(scheduler, f"{number}-{turn}")
                main, workers = (b - a for a, b in zip(before, cpu_seconds(attempts), strict=True))
                figures[number].append((wall, main, workers))
    results = []
    for number, found in figures.items():
        wall, main, workers = (statistics.median(c) for c in zip(*found[1:], strict=True))
        requests = EPISODES * TURNS / 1e3
        results.append(Result(number, wall, TURNS * SECONDS, main / requests, workers / requests))
    return results


def main() -> None:
    """Measure and print a table; with --json one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5, help="the median counts")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    arguments = parser.parse_args()
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, HERE / "canned_vllm.py", str(port), str(SECONDS), str(TOKENS)]
    )
    try:
        time.sleep(START_SECONDS)
        with tempfile.TemporaryDirectory() as folder:
            url = f"http://127.0.0.1:{port}"
            results = asyncio.run(measure(Path(folder), url, arguments.processes, arguments.rounds))
    finally:
        server.kill()
        server.wait()
    print(f"{'processes':>10}{'wall s':>8}{'least s':>9}{'CPU ms here':>13}{'CPU ms there':>14}")
    for result in results:
        print(
            f"{result.processes:>10}{result.wall_seconds:>8.2f}{result.least_seconds:>9.2f}"
            f"{result.main_cpu:>13.3f}{result.workers_cpu:>14.3f}"
        )
    if arguments.json:
        print(json.dumps([asdict(result) for result in results]))


if __name__ == "__main__":
    main()
