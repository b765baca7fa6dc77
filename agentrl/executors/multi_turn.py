"""The loop of an episode: reset, then sample and step until someone says stop.

Who says stop: the environment (DONE), the turn limit (MAX_TURNS), or the token budget (MAX_TOKENS).
The budget is counted before each engine call. A turn that was cut is still scored by `step`, and is
the last one. What the user's code raises goes through as it is, with its traceback.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.chat import Conversation
from agentrl.config import DataConfig, RolloutConfig
from agentrl.executors.base import AgentExecutor, AgentInstance
from agentrl.executors.close_faults import CloseFaults
from agentrl.executors.instance import InstanceRunner
from agentrl.executors.llm import LLM
from agentrl.executors.normalize import as_observation, as_step_result
from agentrl.executors.process.places import EnvHost
from agentrl.executors.process.runner import ProcessRunner
from agentrl.types import Action, Example, Observation, StepResult, StopReason, Trajectory

__all__ = ["Episode", "MultiTurnExecutor"]


@dataclass(slots=True)
class Episode:
    """What belongs to one running episode, and what it has been given so far."""

    example: Example
    llm: LLM
    instance: InstanceRunner | ProcessRunner
    reward: float | None = None
    score: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def take(self, result: StepResult) -> None:
        """Add up a step: rewards are summed, of scores and metrics the last one counts."""
        if result.reward is not None:
            self.reward = (self.reward or 0.0) + result.reward
        if result.score is not None:
            self.score = result.score
        self.metrics.update(result.metrics)
        self.sampling = result.sampling


class MultiTurnExecutor(AgentExecutor):
    """Runs episodes of an `AgentInstance`, a new instance for each.

    Args:
        instance_class: the user's environment.
        rollout: time limits. Turns and tokens are limited by the `LLM`.

    Attributes:
        host: forks a process for each instance; None: they live in this one.
    """

    def __init__(self, instance_class: type[AgentInstance], rollout: RolloutConfig) -> None:
        self.instance_class = instance_class
        self.rollout = rollout
        self.close_faults = CloseFaults()
        self.host: EnvHost | None = None

    def configure(self, rollout: RolloutConfig, data: DataConfig) -> None:
        """Take the run's limits."""
        self.rollout = rollout

    async def execute(self, example: Example, llm: LLM) -> Trajectory:
        """Run one episode; the instance is closed whatever happens.

        Raises:
            AgentError: the agent returned something unusable.
            AgentTimeoutError: a call of the agent took too long.
            UsageError: the first prompt leaves no room for an answer.
            EngineError: the engine failed.
        """
        runner = self.runner(llm.rollout_id)
        episode = Episode(example, llm, runner)
        try:
            await runner.build()
            conversation = llm.conversation(await self.reset(episode))
            stop_reason = await self._play(episode, conversation)
        finally:
            await runner.close()
        return llm.trajectory(
            conversation,
            reward=episode.reward,
            stop_reason=stop_reason,
            score=episode.score,
            metrics=episode.metrics,
            env_seconds=runner.seconds,
        )

    def runner(self, name: str) -> InstanceRunner | ProcessRunner:
        """What calls the instance of the episode `name`, which is not built yet."""
        faults = self.close_faults
        if self.host is None:
            return InstanceRunner(self.instance_class, self.rollout, name=name, close_faults=faults)
        return ProcessRunner(
            self.host, self.instance_class.__name__, self.rollout, name=name, close_faults=faults
        )

    async def close(self) -> None:
        """End the processes of environments, if there are any."""
        if self.host is not None:
            await self.host.close()

    async def reset(self, episode: Episode) -> Observation:
        """The first observation."""
        return as_observation(await episode.instance.reset(episode.example))

    async def step(
        self, episode: Episode, conversation: Conversation, action: Action
    ) -> StepResult:
        """What the instance makes of `action`, the last turn of `conversation`."""
        return as_step_result(await episode.instance.step(action))

    async def _play(self, episode: Episode, conversation: Conversation) -> StopReason:
        llm = episode.llm
        while True:
            generation = await llm.generate(conversation.token_ids, **episode.sampling)
            action = conversation.take(generation)
            result = await self.step(episode, conversation, action)
            conversation.set_reward(result.reward)
            episode.take(result)
            if result.done:
                return StopReason.DONE
            if action.finish_reason == "length":
                return StopReason.MAX_TOKENS
            if conversation.num_turns >= llm.max_turns:
                return StopReason.MAX_TURNS
            observation = as_observation(result.observation)
            if llm.room(conversation.length_with(observation)) < 1:
                return StopReason.MAX_TOKENS
            conversation.append(observation)
