"""What the slowest environments cost: every episode for itself, against a barrier after each turn.

64 environments whose steps take log-normal times run through the real scheduler, on a scripted
engine with a fixed latency. In the same run a loop with a barrier plays the same episodes: all
sample a turn, all step at the same time, and the next turn begins when the slowest step is done, as
where a batch is generated turn by turn. The critical path is the longest episode by itself: its
calls and steps one after the other, which no schedule can shorten.

    python benchmarks/tail_latency.py [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from dataclasses import asdict, dataclass

from agentrl.chat import ChatFormat
from agentrl.config import ModelConfig, RolloutConfig
from agentrl.engines.scripted import ScriptedEngine
from agentrl.executors.base import AgentInstance
from agentrl.executors.groups import GroupRequest
from agentrl.executors.llm import LLM
from agentrl.executors.multi_turn import MultiTurnExecutor
from agentrl.executors.normalize import as_observation, as_step_result
from agentrl.executors.scheduler import RolloutScheduler
from agentrl.models.load import load_tokenizer
from agentrl.types import Action, Example, SamplingParams, StepResult

RESPONSE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Result:
    """The figures that are printed; times in seconds.

    `step_median` and `step_sigma` are those of the log-normal step times, `engine_latency` what
    each engine call takes.
    """

    environments: int
    turns: int
    step_median: float
    step_sigma: float
    engine_latency: float
    critical_path: float
    wall: float
    barrier_wall: float
    speedup_over_barrier: float
    wall_over_critical_path: float


class Slow(AgentInstance):
    """Steps as long as its example says; done after the last of them."""

    async def reset(self, example: Example) -> str:
        self.step_seconds: list[float] = example["step_seconds"]
        return "begin"

    async def step(self, action: Action) -> StepResult:
        await asyncio.sleep(self.step_seconds[action.turn_index])
        if action.turn_index + 1 == len(self.step_seconds):
            return StepResult(reward=1.0, done=True)
        return StepResult("go on")


@dataclass(frozen=True, slots=True)
class Setting:
    """What both loops run: the parts they share, and the times of every step."""

    chat: ChatFormat
    response: tuple[int, ...]
    sampling: SamplingParams
    rollout: RolloutConfig
    latency: float
    step_seconds: list[list[float]]

    @classmethod
    def draw(cls, arguments: argparse.Namespace) -> Setting:
        """Draw the step times, the same ones for a seed."""
        tokenizer = load_tokenizer(ModelConfig())
        chat = ChatFormat(tokenizer)
        text = tokenizer.encode("the answer", add_special_tokens=False)
        generator = random.Random(arguments.seed)
        mu = math.log(arguments.median)
        return cls(
            chat,
            (*text[: RESPONSE_TOKENS - 1], min(chat.end_token_ids)),
            SamplingParams(max_new_tokens=RESPONSE_TOKENS),
            RolloutConfig(max_turns=arguments.turns, max_concurrency=arguments.environments),
            arguments.latency,
            [
                [generator.lognormvariate(mu, arguments.sigma) for _ in range(arguments.turns)]
                for _ in range(arguments.environments)
            ],
        )

    def engine(self) -> ScriptedEngine:
        """A new engine."""
        return ScriptedEngine([self.response], latency=self.latency, record=False)

    @property
    def critical_path(self) -> float:
        """Seconds of the longest episode by itself."""
        return max(sum(steps) + self.latency * len(steps) for steps in self.step_seconds)


async def run_scheduler(setting: Setting) -> float:
    """Seconds that the scheduler takes for all episodes."""
    scheduler = RolloutScheduler.local(
        MultiTurnExecutor(Slow, setting.rollout),
        setting.engine(),
        setting.chat,
        setting.sampling,
        setting.rollout,
    )
    # Members of a group share an example, but each episode has times of its own: groups of one.
    requests = [
        GroupRequest(f"{number:08d}", str(number), {"step_seconds": seconds}, 1)
        for number, seconds in enumerate(setting.step_seconds)
    ]
    began = time.perf_counter()
    result = await scheduler.run(requests)
    if result.num_completed != len(requests):
        raise RuntimeError(f"{result.num_completed} of {len(requests)} episodes completed")
    return time.perf_counter() - began


async def run_barrier(setting: Setting) -> float:
    """Seconds that the loop with a barrier after each turn takes for the same episodes."""
    engine = setting.engine()
    began = time.perf_counter()
    instances, conversations, llms = [], [], []
    for number, seconds in enumerate(setting.step_seconds):
        instances.append(Slow())
        observation = as_observation(await instances[-1].reset({"step_seconds": seconds}))
        llms.append(
            LLM(
                engine,
                setting.chat,
                setting.sampling,
                max_turns=setting.rollout.max_turns,
                max_tokens=setting.rollout.max_tokens,
                rollout_id=str(number),
            )
        )
        conversations.append(llms[-1].conversation(observation))
    active = list(range(len(instances)))
    while active:
        generations = await asyncio.gather(
            *(llms[number].generate(conversations[number].token_ids) for number in active)
        )
        actions = [
            conversations[number].take(generation)
            for number, generation in zip(active, generations, strict=True)
        ]
        steps = await asyncio.gather(
            *(
                instances[number].step(action)
                for number, action in zip(active, actions, strict=True)
            )
        )
        for number, step in zip(active, map(as_step_result, steps), strict=True):
            if not step.done:
                conversations[number].append(as_observation(step.observation))
        active = [number for number, step in zip(active, steps, strict=True) if not step.done]
    return time.perf_counter() - began


async def measure(arguments: argparse.Namespace) -> Result:
    """Run both loops, one after the other, on the same times."""
    setting = Setting.draw(arguments)
    barrier = await run_barrier(setting)
    wall = await run_scheduler(setting)
    return Result(
        environments=arguments.environments,
        turns=arguments.turns,
        step_median=arguments.median,
        step_sigma=arguments.sigma,
        engine_latency=arguments.latency,
        critical_path=setting.critical_path,
        wall=wall,
        barrier_wall=barrier,
        speedup_over_barrier=barrier / wall,
        wall_over_critical_path=wall / setting.critical_path,
    )


def main() -> None:
    """Measure and print a table; with --json one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    parser.add_argument("--environments", type=int, default=64)
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--median", type=float, default=0.05, help="seconds of a step")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of step times")
    parser.add_argument("--latency", type=float, default=0.02, help="seconds of an engine call")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    result = asdict(asyncio.run(measure(arguments)))
    for name, value in result.items():
        print(f"{name:28}{value:>12,.3f}")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
