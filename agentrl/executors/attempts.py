"""One attempt at one episode: whatever happens inside becomes a typed outcome.

The scheduler says which attempts are made, and what becomes of those that fail; here one is run,
within `rollout.episode_timeout`, and ended when it is cancelled. The one broad `except` of agentrl
is `LocalAttempts._episode`.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import traceback
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agentrl.config import RolloutConfig
from agentrl.engines.base import Engine
from agentrl.errors import AgentError, UsageError
from agentrl.executors.base import AgentExecutor
from agentrl.executors.failures import stop_reason_of
from agentrl.executors.groups import GroupRequest
from agentrl.executors.llm import LLM
from agentrl.executors.share import is_chosen
from agentrl.executors.timed_calls import wait_through
from agentrl.types import SamplingParams, StopReason, Trajectory

if TYPE_CHECKING:
    from agentrl.chat import ChatFormat

__all__ = ["CANCEL_GRACE", "Attempts", "LocalAttempts", "Member", "failed_attempt"]

logger = logging.getLogger(__name__)

CANCEL_GRACE = 5.0
"""Seconds beyond `rollout.close_timeout` that a cancelled episode has to end."""

SEED_STRIDE = 1 << 32
"""Keeps the seeds of later attempts apart from every seed that a user sets."""


@dataclass(frozen=True, slots=True)
class Member:
    """One episode of a group, whatever the number of its attempts."""

    request: GroupRequest
    rollout_id: str


class Attempts(ABC):
    """Runs attempts, as many at once as it is asked to."""

    async def start(self) -> None:
        """Make ready. Called once, when the engine runs."""

    async def close(self) -> None:
        """Free what `start` took, also where it failed. Called after the last attempt; safe to call
        twice."""

    def participant(self) -> AbstractContextManager[None]:
        """Announce one caller that will keep calling `run`; see `Engine.participant`."""
        return nullcontext()

    @abstractmethod
    async def run(self, member: Member, attempt: int) -> Trajectory:
        """Run attempt number `attempt` (0 is the first) of a member, with a fresh instance.

        Cancelling this cancels the episode, and returns when its instance is closed.

        Raises:
            UsageError: raised inside the episode: no other attempt can mend it.
        """


class LocalAttempts(Attempts):
    """Runs attempts in this process.

    Args:
        executor: runs one episode; shared by all.
        engine: what samples.
        chat: the chat format that every episode's `LLM` uses.
        sampling: parameters of every call; overrides of one episode never reach another.
        rollout: limits.
        seed: of the run. Episodes with the same rollout_id and attempt sample alike.
        logprobs_share: of the episodes, on which the engine is asked for log-probabilities; the
            rollout_id says whether an episode is one of them.
    """

    def __init__(
        self,
        executor: AgentExecutor,
        engine: Engine,
        chat: ChatFormat,
        sampling: SamplingParams,
        rollout: RolloutConfig,
        *,
        seed: int = 0,
        logprobs_share: float = 1.0,
    ) -> None:
        self._executor = executor
        self._engine = engine
        self._chat = chat
        self._sampling = sampling
        self._rollout = rollout
        self._seed = seed
        self._logprobs_share = logprobs_share

    def participant(self) -> AbstractContextManager[None]:
        """Announce one caller to the engine."""
        return self._engine.participant()

    async def run(self, member: Member, attempt: int) -> Trajectory:
        """Run one episode in a task of its own, within `rollout.episode_timeout`."""
        request = member.request
        llm = LLM(
            self._engine,
            self._chat,
            self._sampling_of(member),
            max_turns=self._rollout.max_turns,
            max_tokens=self._rollout.max_tokens,
            rollout_id=member.rollout_id,
            group_id=request.group_id if request.n_samples > 1 else "",
            seed=self._seed + attempt * SEED_STRIDE,
        )
        episode = asyncio.create_task(self._episode(request, llm), name=member.rollout_id)
        try:
            done, _ = await asyncio.wait({episode}, timeout=self._rollout.episode_timeout)
        except asyncio.CancelledError:
            await self._cancel(episode)
            raise
        return episode.result() if done else await self._time_out(episode)

    def _sampling_of(self, member: Member) -> SamplingParams:
        asked = self._sampling.logprobs and is_chosen(member.rollout_id, self._logprobs_share)
        return replace(self._sampling, logprobs=asked)

    async def _episode(self, request: GroupRequest, llm: LLM) -> Trajectory:
        """The edge of an episode: whatever happens inside becomes a typed outcome."""
        try:
            # A copy, so that an agent that changes its example does not change its siblings'.
            trajectory: object = await self._executor.execute(copy.deepcopy(request.example), llm)
            if not isinstance(trajectory, Trajectory):
                raise AgentError(
                    f"{type(self._executor).__name__}.execute returned a "
                    f"{type(trajectory).__name__}: return llm.trajectory(...)"
                )
            return trajectory
        except UsageError:
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001
            return failed_attempt(stop_reason_of(error), traceback.format_exc())

    async def _time_out(self, episode: asyncio.Task[Trajectory]) -> Trajectory:
        await self._cancel(episode)
        message = (
            f"the episode did not end within rollout.episode_timeout "
            f"({self._rollout.episode_timeout:g} s)"
        )
        where = episode.result().error if episode.done() else None
        return failed_attempt(StopReason.TIMEOUT, f"{message}\n{where}" if where else message)

    async def _cancel(self, episode: asyncio.Task[Trajectory]) -> None:
        """Cancel an episode and give it time to close its instance."""
        episode.cancel()
        grace = self._rollout.close_timeout + CANCEL_GRACE
        try:
            await wait_through(episode, grace)
        finally:
            if not episode.done():
                logger.warning(
                    "episode %s went on for %g s after it was cancelled and is left behind: its "
                    "agent must let asyncio.CancelledError pass",
                    episode.get_name(),
                    grace,
                )


def failed_attempt(stop_reason: StopReason, error: str) -> Trajectory:
    """What is left of an attempt that failed."""
    return Trajectory(sequences=(), reward=None, stop_reason=stop_reason, error=error)
