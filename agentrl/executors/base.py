"""What a user writes: an `AgentInstance` (one environment) or an `AgentExecutor` (the whole loop).

An executor turns one example into one `Trajectory`; it may be called for many examples at once.
An instance lives for one episode: it is built, `reset`, `step`ped until done, and `close`d exactly
once, whatever happened. Its methods may be `def` or `async def`; plain ones run in a thread of
their own, the same one for all calls of an instance.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from agentrl.types import Action, Example, Trajectory

if TYPE_CHECKING:
    from agentrl.config import DataConfig, RolloutConfig
    from agentrl.executors.llm import LLM

__all__ = ["AgentExecutor", "AgentInstance"]


class AgentInstance:
    """One environment for one episode. Subclass it and write `reset` and `step`.

    A new instance is built without arguments for every episode. `max_reward` is the most that an
    episode can earn; a run's summary gives rewards as a share of it.
    """

    max_reward: float = 1.0

    def reset(self, example: Example) -> Any:
        """Begin an episode.

        Returns:
            The first observation: a str (one user message), a list of messages, an `Observation`,
            a dict with the key `observation`, or Gymnasium's `(observation, info)`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define reset(self, example)")

    def step(self, action: Action) -> Any:
        """React to one turn of the policy.

        Returns:
            A `StepResult`, Gymnasium's `(observation, reward, terminated, truncated, info)`, or a
            dict with the keys `observation` or `environment_feedback`, `reward` or `rewards`,
            `done`, and optionally `score` or `scores`, `sampling_params`, `extra_logs`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define step(self, action)")

    def close(self) -> Any:
        """Free what the episode held. Called exactly once, also after errors and cancellation."""


class AgentExecutor(ABC):
    """The whole loop of an episode. Subclass it when `AgentInstance` is not enough."""

    max_reward: float = 1.0
    """The most that an episode can earn."""

    def configure(self, rollout: RolloutConfig, data: DataConfig) -> None:
        """Take the run's settings. Called once, before the first `execute`.

        An executor of a user's file is built without arguments; this is how the settings reach it.
        """

    @abstractmethod
    async def execute(self, example: Example, llm: LLM) -> Trajectory:
        """Run one episode.

        `llm.generate` takes and gives tokens, `llm.chat` messages; `llm.trajectory(...)` makes
        the result from a conversation with its ids filled in.
        """

    async def close(self) -> None:
        """Free what is shared by the episodes. Called after the last of them."""
