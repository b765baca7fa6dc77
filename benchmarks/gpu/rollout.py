"""Multi-turn rollouts through agentrl against the same episodes inside the engine's own process.

256 episodes of 4 turns (see `episodes.py`) run through scheduler, LLM, pool, engine and HTTP to a
server that agentrl starts, with and without log-probabilities, and in turn with each round the same
episodes run in the process of an engine with the same options. Both engines are alive on the GPU
all the time, one idle while the other is measured, so that a host whose speed drifts slows both
alike. Every round has prompts of its own, so that nothing is cached before it. Rates are sampled
tokens per second, medians over rounds; the ratio is the median of the ratios of each round.

    python benchmarks/gpu/rollout.py --engine vllm [--shape qwen2.5-1.5b] [--python PYTHON]
        [--processes 4] [--api-servers 4] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from episodes import Workload
from servers import OPTIONS, server_config, versions
from shapes import SHAPES, card

from agentrl import heap
from agentrl.config import Config
from agentrl.engines import supervisor
from agentrl.engines.factory import make_engine
from agentrl.engines.launch import SGLANG_POLICY, max_running_requests
from agentrl.engines.pool import EnginePool
from agentrl.executors.attempts import Attempts
from agentrl.executors.build import local_attempts
from agentrl.executors.groups import GroupRequest
from agentrl.executors.scheduler import RolloutScheduler
from agentrl.executors.workers.attempts import ProcessAttempts
from agentrl.models.load import load_tokenizer
from agentrl.plugin import load_agent

HERE = Path(__file__).parent
WAYS = {"without": False, "with": True}
"""Whether log-probabilities are asked for."""
IN_PROCESS = 0
"""In place of a number of rollout processes: the engine in its own process."""
EXIT_SECONDS = 15.0
"""How long the engine's own process may take to end when it has closed its pipe."""


@dataclass(frozen=True, slots=True)
class Round:
    """One round.

    Attributes:
        rate: sampled tokens per second.
        processor_seconds: that this process and those below it took, by what they are.
        hits: of the prefix cache, as a share of those that were possible; 0 in process.
    """

    rate: float
    processor_seconds: Mapping[str, float]
    hits: float = 0.0


Rounds = dict[int, dict[str, list[Round]]]
"""By number of rollout processes (or `IN_PROCESS`) and way."""


class InProcess:
    """`in_process.py` under the engine's Python: measures a round whenever it is asked to.

    Like a server it runs under agentrl's supervisor, so that nothing of its engine survives it.
    """

    def __init__(self, config: Config, workload: Workload) -> None:
        call = {
            "kind": config.engine.kind,
            "model": config.model.path,
            "options": in_process_options(config, workload),
            "workload": asdict(workload),
        }
        python = config.engine.python or sys.executable
        watched = [sys.executable, supervisor.__file__, str(os.getpid()), "--"]
        self._command = [*watched, python, HERE / "in_process.py", json.dumps(call)]
        self._process: asyncio.subprocess.Process | None = None
        self._answers = asyncio.StreamReader()

    @property
    def pid(self) -> int:
        """Process id of the supervisor, which it is below."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start it and wait until its engine is ready.

        Raises:
            RuntimeError: it ended.
        """
        read, write = os.pipe()  # engines print to standard output
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self._answers), os.fdopen(read)
        )
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            f"/proc/{os.getpid()}/fd/{write}",
            stdin=asyncio.subprocess.PIPE,
            stdout=sys.stderr,
        )
        await self._answer()
        os.close(write)  # it has opened it by now

    async def rate(self, seed: int, logprobs: bool) -> float:
        """Sampled tokens per second of one round.

        Raises:
            RuntimeError: it ended.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([seed, logprobs]).encode() + b"\n")
        return float(await self._answer())

    async def close(self) -> None:
        """End it; safe before it was started, and when it has ended."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            self._process.terminate()
        await self._process.wait()

    async def _answer(self) -> Any:
        assert self._process is not None
        line = asyncio.create_task(self._answers.readline())
        ended = asyncio.create_task(self._process.wait())
        await asyncio.wait((line, ended), return_when=asyncio.FIRST_COMPLETED)
        if line.done() and line.result():
            ended.cancel()
            return json.loads(line.result())
        line.cancel()
        await asyncio.wait((ended,), timeout=EXIT_SECONDS)
        raise RuntimeError(
            f"the engine in its own process ended with status {self._process.returncode}: "
            "see above what it printed"
        )


def options(kind: str, workload: Workload) -> dict[str, Any]:
    """`OPTIONS` for two engines on one GPU, which start one after the other.

    Each has a cache for twice what the episodes need, as far as there is memory. vLLM takes a share
    of all memory and SGLang of what is free, so that only a number of tokens is the same for both.
    """
    tokens = 2 * workload.episodes * workload.max_model_len
    shares: dict[str, dict[str, Any]] = {
        "vllm": {"gpu_memory_utilization": 0.45},
        "sglang": {
            "mem_fraction_static": 0.8,
            "max_total_tokens": tokens,
            "sleep_on_idle": True,  # else the one that is not measured takes a core
        },
    }
    return OPTIONS[kind] | shares[kind]


def in_process_options(config: Config, workload: Workload) -> dict[str, Any]:
    """The server's, as arguments of the engine."""
    chosen = config.engine.extra | {"dtype": config.model.dtype}
    if config.engine.kind == "vllm":
        return chosen | {
            "max_model_len": workload.max_model_len,
            "max_num_seqs": config.engine.max_num_seqs,
            "logprobs_mode": "processed_logprobs",
        }
    return chosen | {
        "context_length": workload.max_model_len + 8,
        "max_running_requests": max_running_requests(config.engine),
        "schedule_policy": SGLANG_POLICY,
    }


async def run_episodes(
    scheduler: RolloutScheduler, workload: Workload, seed: int, logprobs: bool
) -> tuple[float, float]:
    """Run all episodes; sampled tokens per second, and the share of cache hits."""
    # Every member is a request of its own, since it is told which feedback is its own.
    groups = [
        GroupRequest(
            f"{seed}-{group}-{member}",
            str(group),
            {
                "workload": asdict(workload),
                "group": group,
                "member": member,
                "seed": seed,
                "logprobs": logprobs,
            },
            1,
        )
        for group in range(workload.groups)
        for member in range(workload.members)
    ]
    began = time.perf_counter()
    result = await scheduler.run(groups)
    seconds = time.perf_counter() - began
    if len(result.groups) != workload.episodes:
        raise RuntimeError(f"only {len(result.groups)} episodes ended well")
    cached, possible = (
        sum(trajectory.metrics[name] for trajectory in result.outcomes)
        for name in ("cached", "possible")
    )
    return workload.tokens_sampled / seconds, cached / possible


def processor_seconds(kinds: Mapping[int, str]) -> Counter[str]:
    """Taken so far by this process and those below it, by what they are.

    Args:
        kinds: what the processes are that this one has started; the server's are left out.
    """
    found = Counter({"agentrl": time.process_time()})
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            for process in (child, *child.children(recursive=True)):
                times = process.cpu_times()
                name = f"{kinds.get(child.pid, 'server')} {process.name()}"
                found[name] += times.user + times.system
    return found


def attempts_in(number: int, config: Config, pool: EnginePool) -> Attempts:
    """What runs attempts in so many processes."""
    if number > 1:
        rollout = config.rollout.model_copy(update={"num_processes": number})
        return ProcessAttempts(config.model_copy(update={"rollout": rollout}), pool, ())
    executor = load_agent(config.agent).make_executor(config.rollout, config.data)
    return local_attempts(config, executor, pool, load_tokenizer(config.model), ())


async def measure(
    config: Config, workload: Workload, folder: Path, rounds: int, numbers: Sequence[int]
) -> Rounds:
    """All rounds on one server and in one engine's process, after one that does not count."""
    pool = make_engine(config, run_dir=folder, model_folder=Path(config.model.path))
    assert isinstance(pool, EnginePool)
    limit = InProcess(config, workload)
    sides: dict[int, Attempts] = {}
    async with AsyncExitStack() as stack:
        stack.push_async_callback(pool.close)
        await pool.start()
        # Not at the same time: an engine takes what others do to the GPU's memory while it starts
        # for its own need, and picks kernels by how fast they are.
        stack.push_async_callback(limit.close)
        await limit.start()
        for number in numbers:
            sides[number] = attempts_in(number, config, pool)
            stack.push_async_callback(sides[number].close)
            await sides[number].start()
        heap.freeze(pool)  # as a learner does
        return await measure_rounds(config, workload, rounds, sides, limit)


async def measure_rounds(
    config: Config,
    workload: Workload,
    rounds: int,
    sides: Mapping[int, Attempts],
    limit: InProcess,
) -> Rounds:
    """Every side once and then the limit, round by round."""
    schedulers = {n: RolloutScheduler(side, config.rollout) for n, side in sides.items()}
    found: Rounds = {number: {way: [] for way in WAYS} for number in (*sides, IN_PROCESS)}
    seeds = itertools.count()  # no prompt comes up twice
    for turn, (way, logprobs), number in itertools.product(range(rounds + 1), WAYS.items(), found):
        kinds = dict.fromkeys(worker_pids(sides), "rollout") | {limit.pid: "in process"}
        before = processor_seconds(kinds)
        if number == IN_PROCESS:
            rate, hits = await limit.rate(next(seeds), logprobs), 0.0
        else:
            rate, hits = await run_episodes(schedulers[number], workload, next(seeds), logprobs)
        spent = processor_seconds(kinds) - before
        seconds = {name: round(spent[name], 2) for name in sorted(spent) if spent[name] >= 0.05}
        if turn > 0:
            found[number][way].append(Round(rate, seconds, hits))
        side = "in process" if number == IN_PROCESS else f"processes: {number}"
        print(
            f"round {turn}, {side}, {way} log-probabilities: {rate:,.0f} tok/s; processor seconds: "
            + ", ".join(f"{name} {taken}" for name, taken in seconds.items()),
            file=sys.stderr,
            flush=True,
        )
    return found


def worker_pids(sides: Mapping[int, Attempts]) -> Iterator[int]:
    """Of the rollout processes."""
    for side in sides.values():
        if isinstance(side, ProcessAttempts):
            yield from (worker.pid for worker in side.workers)


def summary(ours: Sequence[Round], limits: Sequence[Round]) -> dict[str, Any]:
    """Medians, and what they come from."""
    pairs = zip(ours, limits, strict=True)
    return {
        "tokens_per_second": statistics.median(each.rate for each in ours),
        "in_process_tokens_per_second": statistics.median(each.rate for each in limits),
        "ratio": statistics.median(mine.rate / limit.rate for mine, limit in pairs),
        "cache_hit_of_possible": statistics.mean(each.hits for each in ours),
        "rounds": [each.rate for each in ours],
        "in_process_rounds": [each.rate for each in limits],
        "processor_seconds": [each.processor_seconds for each in ours],
        "in_process_processor_seconds": [each.processor_seconds for each in limits],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("vllm", "sglang"), required=True)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-1.5b")
    parser.add_argument("--python", type=Path, help="Python of the engine's environment")
    parser.add_argument("--options", type=Path, help="TOML with options of both engines")
    parser.add_argument("--workload", default="{}", help="JSON with fields of episodes.Workload")
    parser.add_argument("--rounds", type=int, default=5, help="the median counts")
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[4], help="values of rollout.num_processes"
    )
    parser.add_argument(
        "--api-servers", type=int, default=4, help="engine.api_server_count of the server"
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    if min(arguments.processes) < 1:
        parser.error("--processes: at least 1")
    workload = Workload(**json.loads(arguments.workload))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine: dict[str, Any] = {
            "python": arguments.python,
            "max_num_seqs": workload.episodes,
            "max_model_len": workload.max_model_len,
            "api_server_count": arguments.api_servers,
            "extra": options(arguments.engine, workload),
        }
        if arguments.options:
            engine["extra"] = tomllib.loads(arguments.options.read_text())
        rollout = {
            "max_tokens": workload.max_model_len,
            "max_new_tokens": workload.sampled,
            "max_concurrency": workload.episodes,
        }
        config = server_config(
            arguments.engine, arguments.shape, folder, engine=engine, rollout=rollout
        ).model_copy(update={"agent": HERE / "talk.py"})
        found = asyncio.run(
            measure(config, workload, folder, arguments.rounds, arguments.processes)
        )
    result = {
        **card(),
        **versions(arguments.python, [arguments.engine]),
        "engine": arguments.engine,
        "shape": arguments.shape,
        "api_servers": arguments.api_servers,
        "processes": {
            number: {way: summary(found[number][way], found[IN_PROCESS][way]) for way in WAYS}
            for number in arguments.processes
        },
    }
    print(
        f"{arguments.engine} {result.get(arguments.engine, '(unknown)')}, {arguments.shape}, "
        f"{arguments.api_servers} API servers, {result['card']}"
    )
    print(
        f"{'processes':>10}{'log-probabilities':>20}{'agentrl tok/s':>16}{'in process':>14}"
        f"{'ratio':>8}{'hits':>8}"
    )
    for number, ways in result["processes"].items():
        for way, row in ways.items():
            print(
                f"{number:>10}{way:>20}{row['tokens_per_second']:>16,.0f}"
                f"{row['in_process_tokens_per_second']:>14,.0f}{row['ratio']:>8.2f}"
                f"{row['cache_hit_of_possible']:>8.3f}"
            )
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
