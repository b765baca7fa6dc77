"""What a turn costs when the engine costs nothing: scheduler, executor, chat format, tokenizer.

Episodes of 5 turns with 64-token feedback run through the real stack on one core, against an
engine that answers at once from a script. The reference, measured in the same process just before,
is what tokenizing the same feedback costs by itself. Environments with `async def` and with plain
`def` methods (which run in threads of their own) are measured one after the other.

    python benchmarks/rollout_overhead.py [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from agentrl.chat import ChatFormat
from agentrl.config import ModelConfig, RolloutConfig
from agentrl.engines.scripted import ScriptedEngine
from agentrl.executors.base import AgentInstance
from agentrl.executors.groups import GroupRequest
from agentrl.executors.multi_turn import MultiTurnExecutor
from agentrl.executors.scheduler import RolloutScheduler
from agentrl.models.load import load_tokenizer
from agentrl.types import Action, Example, SamplingParams, StepResult

TURNS = 5
FEEDBACK_TOKENS = 64
RESPONSE_TOKENS = 16
LETTERS = "abcdefghijklmnopqrstuvwxyz "


@dataclass(frozen=True, slots=True)
class Cost:
    """What some turns cost, in seconds."""

    turns: int
    wall: float
    cpu: float


@dataclass(frozen=True, slots=True)
class Result:
    """The figures that are printed.

    On a core that nobody else uses, seconds and CPU seconds are the same. `ratio` is the CPU time
    of a turn over that of tokenizing its feedback.
    """

    episodes: int
    turns: int
    turns_per_second: float
    turns_per_cpu_second: float
    threads_turns_per_second: float
    threads_turns_per_cpu_second: float
    tokenize_microseconds: float
    ratio: float


def make_feedback(tokenizer: Any, count: int) -> list[str]:
    """Texts of exactly `FEEDBACK_TOKENS` tokens, all different, so that no cache answers."""
    generator = random.Random(0)
    texts: dict[str, None] = {}
    while len(texts) < count:
        letters = "".join(generator.choices(LETTERS, k=8 * FEEDBACK_TOKENS))
        text = tokenizer.decode(encode(tokenizer, letters)[:FEEDBACK_TOKENS])
        if len(encode(tokenizer, text)) == FEEDBACK_TOKENS:
            texts[text] = None
    return list(texts)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Ids of `text`, none added."""
    token_ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return token_ids


class Feedback(AgentInstance):
    """Answers every turn with the next text; done after `TURNS` of them."""

    texts: tuple[str, ...] = ()

    def begin(self, example: Example) -> str:
        """The first text."""
        self.start = TURNS * int(example["number"])
        return self.texts[self.start]

    def answer(self, action: Action) -> StepResult:
        """The next text."""
        if action.turn_index == TURNS - 1:
            return StepResult(reward=1.0, done=True)
        return StepResult(self.texts[self.start + action.turn_index + 1])


class AsyncFeedback(Feedback):
    """With coroutines."""

    async def reset(self, example: Example) -> str:
        """Begin."""
        return self.begin(example)

    async def step(self, action: Action) -> StepResult:
        """Answer."""
        return self.answer(action)


class ThreadedFeedback(Feedback):
    """With plain methods."""

    def reset(self, example: Example) -> str:
        """Begin."""
        return self.begin(example)

    def step(self, action: Action) -> StepResult:
        """Answer."""
        return self.answer(action)


def measure(work: Callable[[], int]) -> Cost:
    """The cost of `work`, which returns how many turns it made."""
    wall, cpu = time.perf_counter(), time.process_time()
    turns = work()
    return Cost(turns, time.perf_counter() - wall, time.process_time() - cpu)


def run_stack(instance_class: type[AgentInstance], tokenizer: Any, episodes: int) -> int:
    """Run the episodes; the number of turns."""
    rollout = RolloutConfig(max_turns=TURNS, max_new_tokens=RESPONSE_TOKENS)
    chat = ChatFormat(tokenizer)
    response = [*encode(tokenizer, "the answer")[: RESPONSE_TOKENS - 1], min(chat.end_token_ids)]
    scheduler = RolloutScheduler.local(
        MultiTurnExecutor(instance_class, rollout),
        ScriptedEngine([response], record=False),
        chat,
        SamplingParams(max_new_tokens=RESPONSE_TOKENS),
        rollout,
    )
    groups = [
        GroupRequest(f"{index:08d}", str(index), {"number": index}, 1) for index in range(episodes)
    ]
    result = asyncio.run(scheduler.run(groups))
    turns = sum(trajectory.num_turns for trajectory in result.trajectories)
    if turns != episodes * TURNS:
        raise RuntimeError(f"{turns} turns instead of {episodes * TURNS}: an episode broke")
    return turns


def tokenize(tokenizer: Any) -> int:
    """Tokenize the feedback of all turns, as a loop that did nothing else would."""
    for text in Feedback.texts:
        encode(tokenizer, text)
    return len(Feedback.texts)


def run(model_path: str, episodes: int) -> Result:
    """Measure the reference, then the stack with both kinds of environment."""
    tokenizer = load_tokenizer(ModelConfig(path=model_path))
    Feedback.texts = tuple(make_feedback(tokenizer, episodes * TURNS))
    run_stack(AsyncFeedback, tokenizer, min(episodes, 50))  # imports and caches
    reference = measure(lambda: tokenize(tokenizer))
    coroutines = measure(lambda: run_stack(AsyncFeedback, tokenizer, episodes))
    threads = measure(lambda: run_stack(ThreadedFeedback, tokenizer, episodes))
    return Result(
        episodes=episodes,
        turns=coroutines.turns,
        turns_per_second=coroutines.turns / coroutines.wall,
        turns_per_cpu_second=coroutines.turns / coroutines.cpu,
        threads_turns_per_second=threads.turns / threads.wall,
        threads_turns_per_cpu_second=threads.turns / threads.cpu,
        tokenize_microseconds=1e6 * reference.cpu / reference.turns,
        ratio=(coroutines.cpu / coroutines.turns) / (reference.cpu / reference.turns),
    )


def main() -> None:
    """Measure and print a table; with --json one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--model", default="tiny", help="whose tokenizer: a folder, a name or tiny")
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    result = asdict(run(arguments.model, arguments.episodes))
    for name, value in result.items():
        print(f"{name:28}{value:>12,.1f}")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
