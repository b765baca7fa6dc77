"""Runs many episodes at once and gives them back as groups.

Each member of a group is one episode, each episode one asyncio task; there is no barrier between
turns. Invariants: results are formed by group id and sorted by rollout_id, whatever the timing;
a failed attempt is a typed outcome with its traceback, run again with a fresh instance and another
seed under the same rollout_id, then dropped and counted (see `failures`); an error of the scheduler
itself or of the run's settings ends the run at once. Where an attempt runs, in this process or in
another, makes no difference here (see `attempts`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from agentrl.config import RolloutConfig
from agentrl.engines.base import Engine
from agentrl.errors import AgentRLError
from agentrl.executors.attempts import Attempts, LocalAttempts, Member
from agentrl.executors.base import AgentExecutor
from agentrl.executors.failures import CircuitBreaker, FailurePolicy
from agentrl.executors.groups import GroupRequest, RolloutGroup, RolloutResult, batch_warnings
from agentrl.types import SamplingParams, StopReason, Trajectory

if TYPE_CHECKING:
    from agentrl.chat import ChatFormat

__all__ = ["RolloutScheduler"]


class RolloutScheduler:
    """Samples groups of episodes with bounded concurrency.

    Args:
        attempts: runs one attempt at an episode. Each of the `rollout.max_concurrency` workers is
            one participant.
        rollout: concurrency, retries and group size.
    """

    def __init__(self, attempts: Attempts, rollout: RolloutConfig) -> None:
        self._attempts = attempts
        self._rollout = rollout
        self._slots = asyncio.Semaphore(rollout.max_concurrency)
        self._policy = FailurePolicy.of(rollout)
        self._breaker = CircuitBreaker(self._policy)

    @classmethod
    def local(
        cls,
        executor: AgentExecutor,
        engine: Engine,
        chat: ChatFormat,
        sampling: SamplingParams,
        rollout: RolloutConfig,
        *,
        seed: int = 0,
        logprobs_share: float = 1.0,
    ) -> Self:
        """A scheduler whose episodes run in this process; see `LocalAttempts`."""
        attempts = LocalAttempts(
            executor,
            engine,
            chat,
            sampling,
            rollout,
            seed=seed,
            logprobs_share=logprobs_share,
        )
        return cls(attempts, rollout)

    async def run(
        self,
        requests: Iterable[GroupRequest],
        on_trajectory: Callable[[Trajectory], None] | None = None,
        *,
        patience: int | None = None,
    ) -> RolloutResult:
        """Sample every member of every group.

        Several calls may run at once; `rollout.max_concurrency` is for all of them together.
        Cancelling a call cancels every episode of it and returns when their instances are closed.

        Args:
            requests: the groups, with distinct ids.
            on_trajectory: called with the last attempt of each member as soon as it ended.
            patience: how many members may fail before any has ever completed; without it, all of
                this call but one.

        Raises:
            UsageError: raised inside an episode: no retry can mend it.
            AgentError: no episode completes because the agent fails, or, with
                `rollout.fail_fast`, one did not.
            EngineError: the same, because the engine fails.
        """
        batch = _Batch(list(requests), on_trajectory)
        stacks = [ExitStack() for _ in batch.waiting][: self._rollout.max_concurrency]
        try:
            # All participants are announced before the first call, so that a deterministic
            # engine knows from the start for whom it waits.
            for stack in stacks:
                stack.enter_context(self._attempts.participant())
            workers = [asyncio.create_task(self._work(batch, stack)) for stack in stacks]
            await _join(workers, batch)
        finally:
            for stack in stacks:
                stack.close()
        if batch.waiting or len(batch.outcomes) != batch.size:
            raise AgentRLError(
                f"only {len(batch.outcomes)} of {batch.size} episodes were delivered: a rollout "
                "worker ended early; run again with --resume"
            )
        self._breaker.batch_ended(patience or batch.size)
        return batch.result(self._rollout.min_group_size)

    async def _work(self, batch: _Batch, participation: ExitStack) -> None:
        """One worker: takes the next member until there is none."""
        try:
            with participation:
                while batch.waiting:
                    async with self._slots:
                        if not batch.waiting:
                            break  # the others took the rest while this one waited
                        trajectory = await self._sample(batch.waiting.popleft(), batch)
                    batch.deliver(trajectory)
                    self._breaker.member_ended(trajectory)
        except asyncio.CancelledError:
            if batch.stopping:
                raise
            raise AgentRLError(
                "a rollout worker was cancelled from outside before it delivered its episode: "
                "run again with --resume"
            ) from None

    async def _sample(self, member: Member, batch: _Batch) -> Trajectory:
        """Run a member until an attempt completes or none is left; its last attempt."""
        attempt = 0
        while True:
            trajectory = await self._attempt(member, attempt, batch.submitted)
            if not trajectory.stop_reason.failed:
                return trajectory
            batch.num_failed[trajectory.stop_reason] += 1
            self._breaker.attempt_failed(trajectory)
            pause = self._policy.pause(attempt)
            if pause is None:
                return trajectory
            await asyncio.sleep(pause)
            attempt += 1
            batch.num_retried += 1

    async def _attempt(self, member: Member, attempt: int, submitted: float) -> Trajectory:
        request = member.request
        queued = time.perf_counter() - submitted
        trajectory = await self._attempts.run(member, attempt)
        return replace(
            trajectory,
            example_id=request.example_id,
            group_id=request.group_id,
            rollout_id=member.rollout_id,
            timings=replace(trajectory.timings, queue=queued),
        )


class _Batch:
    """The state of one `run`: who waits, what came of the others."""

    def __init__(
        self, requests: list[GroupRequest], on_trajectory: Callable[[Trajectory], None] | None
    ) -> None:
        repeated = [
            k for k, n in Counter(request.group_id for request in requests).items() if n > 1
        ]
        if repeated:
            raise ValueError(f"group ids must be distinct, {repeated[0]!r} is not")
        self._requests = requests
        self._on_trajectory = on_trajectory
        self.waiting = deque(
            Member(request, rollout_id)
            for request in requests
            for rollout_id in request.rollout_ids()
        )
        self.size = len(self.waiting)
        self.submitted = time.perf_counter()
        self.outcomes: dict[str, Trajectory] = {}
        self.num_failed: Counter[StopReason] = Counter()
        self.num_retried = 0
        self.stopping = False

    def deliver(self, trajectory: Trajectory) -> None:
        """Take the last attempt of a member."""
        self.outcomes[trajectory.rollout_id] = trajectory
        if self._on_trajectory is not None:
            self._on_trajectory(trajectory)

    def result(self, min_group_size: int) -> RolloutResult:
        """The groups in the order of the requests, their members sorted by rollout_id."""
        groups = []
        for request in self._requests:
            members = [self.outcomes[rollout_id] for rollout_id in request.rollout_ids()]
            completed = tuple(t for t in members if not t.stop_reason.failed)
            group = RolloutGroup(request.group_id, request.example_id, completed)
            if len(group.rewards) >= min_group_size:
                groups.append(group)
        outcomes = tuple(self.outcomes[rollout_id] for rollout_id in sorted(self.outcomes))
        dropped = tuple(trajectory for trajectory in outcomes if trajectory.stop_reason.failed)
        return RolloutResult(
            groups=tuple(groups),
            outcomes=outcomes,
            dropped=dropped,
            num_completed=self.size - len(dropped),
            num_failed=dict(sorted(self.num_failed.items())),
            num_retried=self.num_retried,
            num_dropped_groups=len(self._requests) - len(groups),
            seconds=time.perf_counter() - self.submitted,
            warnings=batch_warnings(groups, dropped),
        )


async def _join(workers: list[asyncio.Task[None]], batch: _Batch) -> None:
    """Wait for all workers; the first that fails ends the others and is raised."""
    if not workers:
        return
    try:
        done, _ = await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        batch.stopping = True
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    for worker in done:
        if not worker.cancelled():
            worker.result()
