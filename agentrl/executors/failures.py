"""What is done about episodes that fail: run them again, drop them, or end the run.

An environment's error, an engine's and a time limit are failures of an attempt, told apart by their
`StopReason`; what the model does wrong is none: it is answered, and the episode goes on.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Self

from agentrl.config import RolloutConfig
from agentrl.errors import (
    AgentError,
    AgentTimeoutError,
    ContextOverflowError,
    EngineError,
)
from agentrl.executors.failure_text import shorten
from agentrl.types import StopReason, Trajectory

__all__ = ["CircuitBreaker", "FailurePolicy", "stop_reason_of"]

LONGEST_PAUSE = 60.0
"""Seconds: pauses before further attempts grow to this."""

MOST_DOUBLINGS = 64


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """How often a failed member is run again, after which pauses, and when the run gives up.

    Attributes:
        max_retries: attempts beyond the first, each with a fresh instance.
        retry_pause: seconds before the first of them; every further pause is twice as long.
        fail_fast: the first failed attempt ends the run.
        most_failures: so many members that failed every attempt, with none that completed in
            between, end the run.
        in_flight: added to that once a member has completed, since one outage fails everything
            that is in flight.
    """

    max_retries: int
    retry_pause: float
    fail_fast: bool
    most_failures: int
    in_flight: int

    @classmethod
    def of(cls, rollout: RolloutConfig) -> Self:
        """The policy that a run is configured with."""
        return cls(
            max_retries=rollout.max_retries,
            retry_pause=rollout.retry_pause,
            fail_fast=rollout.fail_fast,
            most_failures=rollout.max_consecutive_failures,
            in_flight=rollout.max_concurrency,
        )

    def pause(self, attempt: int) -> float | None:
        """Seconds from the end of attempt `attempt` (0 is the first) to the next; None: drop it."""
        if attempt >= self.max_retries:
            return None
        return min(self.retry_pause * 2.0 ** min(attempt, MOST_DOUBLINGS), LONGEST_PAUSE)


class CircuitBreaker:
    """Ends a run in which nothing succeeds.

    Args:
        policy: says after how many failures.
    """

    def __init__(self, policy: FailurePolicy) -> None:
        self._policy = policy
        self._num_completed = 0
        self._num_failed = 0
        self._first: Trajectory | None = None
        self._attempts: Counter[StopReason] = Counter()

    def attempt_failed(self, trajectory: Trajectory) -> None:
        """Take note of a failed attempt.

        Raises:
            AgentError, EngineError: the policy is to fail fast.
        """
        self._attempts[trajectory.stop_reason] += 1
        if self._policy.fail_fast:
            raise self._error(
                "an attempt failed and rollout.fail_fast is set", trajectory, "The failure"
            )

    def member_ended(self, trajectory: Trajectory) -> None:
        """Take note of the last attempt of a member.

        Raises:
            AgentError, EngineError: so many have failed in a row that no other will succeed.
        """
        if not trajectory.stop_reason.failed:
            self._num_completed += 1
            self._num_failed, self._first = 0, None
            self._attempts.clear()
            return
        self._num_failed += 1
        self._first = self._first or trajectory
        most = self._policy.most_failures
        self._check(most + self._policy.in_flight if self._num_completed else most)

    def batch_ended(self, patience: int) -> None:
        """Raise as `member_ended` does where nothing has ever completed and `patience` members
        failed."""
        if not self._num_completed:
            self._check(patience)

    def _check(self, limit: int) -> None:
        if self._first is None or self._num_failed < limit:
            return
        kinds = ", ".join(f"{kind}: {n}" for kind, n in sorted(self._attempts.items()))
        since = f"{self._num_failed} episodes in a row, after {self._num_completed} that completed,"
        first = f"every one of the first {self._num_failed} episodes"
        raise self._error(
            f"{since if self._num_completed else first} failed (attempts by kind: {kinds})",
            self._first,
            "The first failure",
        )

    def _error(self, what: str, failure: Trajectory, which: str) -> AgentError | EngineError:
        engine_only = set(self._attempts) == {StopReason.ENGINE_ERROR}
        return (EngineError if engine_only else AgentError)(
            f"{what}; correct the {'engine' if engine_only else 'agent (try `agentrl check`)'}. "
            f"{which}, of episode {failure.rollout_id}:\n{shorten(failure.error or '')}"
        )


def stop_reason_of(error: BaseException) -> StopReason:
    """How an episode failed, by what it raised or what that was raised from."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ContextOverflowError):
            return StopReason.ENV_ERROR  # the loop that made the call should have counted first
        if isinstance(cause, EngineError):
            return StopReason.ENGINE_ERROR
        if isinstance(cause, AgentTimeoutError | TimeoutError):
            return StopReason.TIMEOUT
        if isinstance(cause, asyncio.CancelledError):
            return StopReason.CANCELLED
        cause = cause.__cause__
    return StopReason.ENV_ERROR
