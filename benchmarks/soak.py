"""Many episodes of which some break: everything is counted, and nothing is left behind.

Episodes of three turns run through the real scheduler on a scripted engine. Of each hundred one
raises (every other one of these only the first time), one hangs until its time limit and one says
what cannot be read. One in ten has plain methods, in a thread; the others have coroutines. What
must come of that is worked out beforehand and compared with the counters of the run; memory is
compared between the end of the first tenth and the end of the run.

    python benchmarks/soak.py [--json] [--episodes 100000] [--minutes 30]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import psutil

from agentrl.chat import ChatFormat
from agentrl.config import ModelConfig, RolloutConfig
from agentrl.engines.scripted import ScriptedEngine
from agentrl.executors.base import AgentInstance
from agentrl.executors.groups import GroupRequest, RolloutResult
from agentrl.executors.instance import InstanceRunner
from agentrl.executors.multi_turn import MultiTurnExecutor
from agentrl.executors.scheduler import RolloutScheduler
from agentrl.models.load import load_tokenizer
from agentrl.types import Action, Example, SamplingParams, StepResult

TURNS = 3
MEMBERS = 4
RETRIES = 1
STEP_TIMEOUT = 2.0
"""Seconds: far more than a busy machine may keep an episode waiting that does not hang."""
HANG_SECONDS = 1.5 * STEP_TIMEOUT
"""How long a thread hangs: when its call returns at last, it ends."""


@dataclass(frozen=True, slots=True)
class Result:
    """The figures that are printed; the counts are those of the run, equal to what must be."""

    episodes: int
    seconds: float
    episodes_per_second: float
    completed: int
    env_errors: int
    timeouts: int
    retried: int
    dropped: int
    mistakes: int
    instances: int
    megabytes_after_warm_up: float
    megabytes: float
    memory_growth: float
    tasks_left: int
    threads_left: int


def kind_of(number: int) -> str:
    """What episode `number` does."""
    match number % 100:
        case 13:
            return "flaky" if number // 100 % 2 else "raise"
        case 37:
            return "hang"
        case 71:
            return '{"move": '
    return "play"


def has_thread(number: int) -> bool:
    """Whether it has plain methods; a tenth of each kind."""
    return number // 100 % 10 == 0


class Env(AgentInstance):
    """Does what the policy says. Counts how many were built, and how many closed."""

    built = 0
    closed = 0

    def __init__(self) -> None:
        Env.built += 1

    def answer(self, action: Action) -> StepResult:
        """Go on, or end, or raise."""
        if action.text == "raise":
            raise ConnectionError("the simulator is gone")
        mistakes = 0.0
        if action.text.startswith("{"):
            try:
                json.loads(action.text)
            except json.JSONDecodeError:
                mistakes = 1.0
        if action.turn_index + 1 == TURNS:
            return StepResult(reward=1.0, done=True, metrics={"mistakes": mistakes})
        return StepResult("that cannot be read" if mistakes else "go on", reward=0.0)


class Coroutines(Env):
    async def reset(self, example: Example) -> str:
        return "begin"

    async def step(self, action: Action) -> StepResult:
        if action.text == "hang":
            await asyncio.Event().wait()
        return self.answer(action)

    async def close(self) -> None:
        Env.closed += 1


class Threaded(Env):
    def reset(self, example: Example) -> str:
        return "begin"

    def step(self, action: Action) -> StepResult:
        if action.text == "hang":
            time.sleep(HANG_SECONDS)
        return self.answer(action)

    def close(self) -> None:
        Env.closed += 1


class Executor(MultiTurnExecutor):
    """Gives an episode the kind of instance that its number says."""

    def runner(self, name: str) -> InstanceRunner:
        kind = Threaded if has_thread(number_of(name)) else Coroutines
        return InstanceRunner(kind, self.rollout, name=name, close_faults=self.close_faults)


def number_of(rollout_id: str) -> int:
    """The number of an episode."""
    group, member = rollout_id.split("-")
    return int(group) * MEMBERS + int(member)


def make_scheduler(concurrency: int) -> RolloutScheduler:
    """The real stack on an engine that says what each episode is to do."""
    tokenizer = load_tokenizer(ModelConfig())
    chat = ChatFormat(tokenizer)
    said = {
        text: (*tokenizer.encode(text, add_special_tokens=False), min(chat.end_token_ids))
        for text in map(kind_of, range(200))
    }
    have_raised: set[str] = set()

    def script(prompt: Sequence[int], params: SamplingParams, rollout_id: str) -> Sequence[int]:
        kind = kind_of(number_of(rollout_id))
        if kind == "flaky":
            kind = "play" if rollout_id in have_raised else "raise"
            have_raised.add(rollout_id)
        return said[kind]

    rollout = RolloutConfig(
        max_turns=TURNS,
        max_retries=RETRIES,
        retry_pause=0.01,
        step_timeout=STEP_TIMEOUT,
        max_concurrency=concurrency,
    )
    return RolloutScheduler.local(
        Executor(Coroutines, rollout),
        ScriptedEngine(script, latency=0.001, record=False),
        chat,
        SamplingParams(max_new_tokens=16),
        rollout,
    )


def expected(episodes: int) -> dict[str, int]:
    """The counts that must come of it."""
    kinds = Counter(map(kind_of, range(episodes)))
    broken = kinds["raise"] + kinds["hang"]
    return {
        "completed": episodes - broken,
        "env_errors": kinds["flaky"] + kinds["raise"] * (1 + RETRIES),
        "timeouts": kinds["hang"] * (1 + RETRIES),
        "retried": kinds["flaky"] + broken * RETRIES,
        "dropped": broken,
        "mistakes": kinds['{"move": '],
        "instances": episodes + kinds["flaky"] + broken * RETRIES,
    }


def count(result: RolloutResult) -> Counter[str]:
    """The counters of one round."""
    mistakes = sum(trajectory.metrics["mistakes"] for trajectory in result.trajectories)
    return Counter(
        completed=result.num_completed,
        env_errors=result.num_failed.get("env_error", 0),  # type: ignore[call-overload]
        timeouts=result.num_failed.get("timeout", 0),  # type: ignore[call-overload]
        retried=result.num_retried,
        dropped=len(result.dropped),
        mistakes=int(mistakes),
    )


def megabytes() -> float:
    """Resident memory of this process, without what the collector would free."""
    gc.collect()
    return psutil.Process().memory_info().rss / 2**20


async def threads_left(before: set[threading.Thread]) -> int:
    """How many threads that were not there `before` do not end, once hung calls had the time."""
    new = set(threading.enumerate()) - before
    deadline = time.monotonic() + 2 * HANG_SECONDS
    for thread in new:
        await asyncio.to_thread(thread.join, max(0.0, deadline - time.monotonic()))
    return sum(thread.is_alive() for thread in new)


async def soak(episodes: int, rounds: int, minutes: float, concurrency: int) -> Result:
    """Run all rounds, and compare what came of them with what must have."""
    scheduler = make_scheduler(concurrency)
    groups = [GroupRequest(f"{g:08d}", str(g), {}, MEMBERS) for g in range(episodes // MEMBERS)]
    size = -(-len(groups) // rounds)
    counts: Counter[str] = Counter()
    memory: list[float] = []
    threads, began = set(threading.enumerate()), time.perf_counter()
    for begin in range(0, len(groups), size):
        counts += count(await scheduler.run(groups[begin : begin + size]))
        memory.append(megabytes())
        print(f"{min(begin + size, len(groups)) * MEMBERS:>8} episodes {memory[-1]:>10.1f} MiB")
        due = 60 * minutes * len(memory) / rounds
        await asyncio.sleep(max(0.0, due - (time.perf_counter() - began)))
    seconds = time.perf_counter() - began
    left = await threads_left(threads)
    counts["instances"] = Env.built
    if counts != Counter(expected(episodes)) or Env.closed != Env.built:
        raise RuntimeError(
            f"counted {dict(counts)} and {Env.closed} closed, must be {expected(episodes)}"
        )
    warm = memory[max(len(memory) // 10, 1) - 1]
    return Result(
        episodes=episodes,
        seconds=seconds,
        episodes_per_second=episodes / seconds,
        **counts,
        megabytes_after_warm_up=warm,
        megabytes=memory[-1],
        memory_growth=memory[-1] / warm - 1,
        tasks_left=len(asyncio.all_tasks()) - 1,
        threads_left=left,
    )


def main() -> None:
    """Soak and print a table; with --json one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    parser.add_argument("--episodes", type=int, default=100_000, help="a multiple of 400")
    parser.add_argument("--rounds", type=int, default=20, help="memory is read after each")
    parser.add_argument("--minutes", type=float, default=0.0, help="spread them over so long")
    parser.add_argument("--concurrency", type=int, default=256)
    arguments = parser.parse_args()
    if arguments.episodes % (100 * MEMBERS):
        parser.error("--episodes must be a multiple of 400")
    figures = soak(arguments.episodes, arguments.rounds, arguments.minutes, arguments.concurrency)
    result = asdict(asyncio.run(figures))
    for name, value in result.items():
        print(f"{name:28}{value:>12,.4g}")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
