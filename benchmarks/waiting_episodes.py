"""What an episode that waits costs in memory: thousands are in flight at once in one process.

The engine holds every call until all episodes wait in it, which is when memory is read; then it
answers, and all must complete.

    python benchmarks/waiting_episodes.py [--json] [--episodes 10000]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import psutil

from agentrl.chat import ChatFormat
from agentrl.config import ModelConfig, RolloutConfig
from agentrl.engines.scripted import ScriptedEngine
from agentrl.executors.base import AgentInstance
from agentrl.executors.groups import GroupRequest
from agentrl.executors.multi_turn import MultiTurnExecutor
from agentrl.executors.scheduler import RolloutScheduler
from agentrl.models.load import load_tokenizer
from agentrl.types import Action, Example, Generation, SamplingParams, StepResult

MEMBERS = 8


@dataclass(frozen=True, slots=True)
class Result:
    """The figures that are printed."""

    episodes: int
    prompt_tokens: int
    kilobytes_per_waiting_episode: float
    seconds: float


class HoldingEngine(ScriptedEngine):
    """Holds every call until so many are there.

    Attributes:
        all_waiting: set when they are; calls go on when `release` is.
    """

    def __init__(self, response: Sequence[int], count: int) -> None:
        super().__init__([response], record=False)
        self._missing = count
        self.all_waiting, self.release = asyncio.Event(), asyncio.Event()

    async def generate(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        rollout_id: str = "",
        group_id: str = "",
    ) -> Generation:
        self._missing -= 1
        if self._missing == 0:
            self.all_waiting.set()
        await self.release.wait()
        return await super().generate(token_ids, params, rollout_id=rollout_id, group_id=group_id)


class Once(AgentInstance):
    async def reset(self, example: Example) -> str:
        return str(example["prompt"])

    async def step(self, action: Action) -> StepResult:
        return StepResult(reward=1.0, done=True)


def resident() -> int:
    """Bytes of this process, without what the collector would free."""
    gc.collect()
    return psutil.Process().memory_info().rss


async def measure(episodes: int, prompt_tokens: int) -> Result:
    """Let all episodes wait at once, then end them."""
    tokenizer = load_tokenizer(ModelConfig())
    chat = ChatFormat(tokenizer)
    generator = random.Random(0)
    letters = "".join(generator.choices("abcdefghijklmnopqrstuvwxyz ", k=8 * prompt_tokens))
    ids = tokenizer.encode(letters, add_special_tokens=False)[:prompt_tokens]
    rollout = RolloutConfig(max_concurrency=episodes, max_tokens=2 * prompt_tokens + 256)
    engine = HoldingEngine([min(chat.end_token_ids)], episodes)
    scheduler = RolloutScheduler.local(
        MultiTurnExecutor(Once, rollout), engine, chat, SamplingParams(max_new_tokens=16), rollout
    )
    example = {"prompt": tokenizer.decode(ids)}
    requests = [
        GroupRequest(f"{group:08d}", str(group), example, MEMBERS)
        for group in range(episodes // MEMBERS)
    ]
    before, began = resident(), time.perf_counter()
    running = asyncio.create_task(scheduler.run(requests))
    await engine.all_waiting.wait()
    waiting = resident()
    engine.release.set()
    result = await running
    if result.num_completed != episodes:
        raise RuntimeError(f"only {result.num_completed} of {episodes} episodes completed")
    return Result(
        episodes=episodes,
        prompt_tokens=len(ids),
        kilobytes_per_waiting_episode=(waiting - before) / 1024 / episodes,
        seconds=time.perf_counter() - began,
    )


def main() -> None:
    """Measure and print a table; with --json one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    parser.add_argument("--episodes", type=int, default=10_000, help=f"a multiple of {MEMBERS}")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    arguments = parser.parse_args()
    if arguments.episodes % MEMBERS:
        parser.error(f"--episodes must be a multiple of {MEMBERS}")
    result = asdict(asyncio.run(measure(arguments.episodes, arguments.prompt_tokens)))
    for name, value in result.items():
        print(f"{name:32}{value:>12,.1f}")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
