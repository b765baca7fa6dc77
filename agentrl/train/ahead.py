"""Groups sampled ahead of training, so that neither waits for the other.

With `train.max_staleness` k there are always so many groups under way or finished that k + 1
batches can be made of them. A batch takes those that finish first; what is not taken stays for a
later batch. With `train.stale` `wait`, a group that began k versions ago must be in the batch, and
is waited for, so that no token is older than k versions when it is trained on; such groups always
fit: after k more batches, at most one batch of the groups that are under way now is left. Otherwise
nothing is waited for, and `admit` says what of a group is young enough.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from agentrl.executors.groups import GroupRequest, RolloutResult
from agentrl.train.buffer import FinishedGroup
from agentrl.train.refill import merge_rollouts

__all__ = ["RolloutsAhead"]


@dataclass(eq=False, slots=True)
class _Group:
    """One group under way: under which weights it began, and when it ended among the others."""

    group_id: str
    version: int
    task: asyncio.Future[RolloutResult]
    place: int = field(default=-1)

    @property
    def is_finished(self) -> bool:
        """Whether it was sampled; one whose sampling raised, which ends the run, was not."""
        task = self.task
        return task.done() and not task.cancelled() and task.exception() is None


class RolloutsAhead:
    """Keeps groups under way and makes batches of those that are done.

    Args:
        sample: samples one group.
        draw: gives the next group of the data.
        fills: whether a group counts towards the size of its batch; those that do not are in it
            too, for the log.
        explain: warnings about a batch that was given up with so many groups missing (0: none).
        batch_size: groups of a batch.
        max_staleness: k, at least 1.
        waits: whether a batch waits for groups that began k versions ago.
        admit: gives what is to be in a batch of a group, by the version that is trained next.
        max_refills: a batch is given up on when it holds 1 + `max_refills` times its size.
    """

    def __init__(
        self,
        sample: Callable[[GroupRequest], Coroutine[Any, Any, RolloutResult]],
        draw: Callable[[], GroupRequest],
        fills: Callable[[RolloutResult], bool],
        explain: Callable[[int], dict[str, str]],
        *,
        batch_size: int,
        max_staleness: int,
        max_refills: int,
        waits: bool = True,
        admit: Callable[[RolloutResult, int], RolloutResult] = lambda result, version: result,
    ) -> None:
        self._sample, self._draw, self._fills, self._explain = sample, draw, fills, explain
        self._waits, self._admit = waits, admit
        self._batch_size, self._max_staleness = batch_size, max_staleness
        self._most_taken = batch_size * (1 + max_refills)
        self._groups: list[_Group] = []
        self._places = itertools.count()
        self._last_batch: float | None = None

    async def next_batch(self, version: int, steps_left: int) -> RolloutResult:
        """The next batch, sorted by group id.

        Args:
            version: of the weights that are trained next; groups begin under it from now on.
            steps_left: batches still to be made, this one included: no more is sampled than they
                need.

        Raises:
            AgentRLError: as the scheduler's `run`.
        """
        if self._last_batch is None:
            self._last_batch = time.perf_counter()
        batches = min(self._max_staleness + 1, steps_left)
        taken: list[RolloutResult] = []
        missing = self._batch_size
        while missing > 0 and len(taken) < self._most_taken:
            self._begin((batches - 1) * self._batch_size + missing, version)
            room = min(missing, self._most_taken - len(taken))
            group = await self._first_done(version, room)
            self._groups.remove(group)
            taken.append(self._admit(group.task.result(), version))
            missing -= self._fills(taken[-1])
        taken.sort(key=lambda result: result.outcomes[0].group_id)
        now = time.perf_counter()
        seconds, self._last_batch = now - self._last_batch, now
        return replace(merge_rollouts(taken, self._explain(missing)), seconds=seconds)

    @property
    def unfinished(self) -> list[str]:
        """The ids of the groups that are in no batch yet and not finished."""
        return [group.group_id for group in self._groups if not group.is_finished]

    @property
    def finished(self) -> list[FinishedGroup]:
        """The groups that are in no batch yet but finished, in the order in which they ended."""
        done = sorted((g for g in self._groups if g.is_finished), key=lambda group: group.place)
        return [FinishedGroup(g.group_id, g.version, g.task.result()) for g in done]

    def restore(self, groups: Iterable[FinishedGroup]) -> None:
        """Take groups that were `finished` in a checkpoint, before the first batch."""
        for each in groups:
            future = asyncio.get_running_loop().create_future()
            future.set_result(each.result)
            group = _Group(each.group_id, each.version, future, next(self._places))
            self._groups.append(group)

    def metrics(self, version: int) -> dict[str, float]:
        """Groups that wait and that run, the mean sampled tokens of the episodes that wait, and how
        many versions before `version` the oldest of all these groups began."""
        done = [group.result for group in self.finished]
        lengths = [t.num_sampled for result in done for t in result.trajectories]
        metrics = {
            "ahead/finished_groups": float(len(done)),
            "ahead/running_groups": float(len(self._groups) - len(done)),
        }
        if lengths:
            metrics["ahead/waiting_length"] = float(np.mean(lengths))
        if self._groups:
            metrics["ahead/oldest"] = float(version - min(group.version for group in self._groups))
        return metrics

    async def close(self) -> None:
        """End what is under way; every instance is closed when this returns."""
        for group in self._groups:
            group.task.cancel()
        await asyncio.gather(*(group.task for group in self._groups), return_exceptions=True)
        self._groups.clear()

    def _begin(self, count: int, version: int) -> None:
        """Begin groups until `count` are under way or wait."""
        while len(self._groups) < count:
            request = self._draw()
            task = asyncio.create_task(self._sample(request), name=request.group_id)
            self._groups.append(group := _Group(request.group_id, version, task))
            task.add_done_callback(partial(self._note_end, group))

    def _note_end(self, group: _Group, _: object) -> None:
        group.place = next(self._places)

    async def _first_done(self, version: int, room: int) -> _Group:
        """Wait for a group that may be taken; of those that are done, the one that was first.

        Args:
            version: of the weights that are trained next.
            room: how many more the batch surely takes: once those that are due need all of it, no
                other is taken.
        """
        oldest = version - self._max_staleness
        due = [group for group in self._groups if self._waits and group.version <= oldest]
        candidates = due if len(due) >= room else self._groups
        await asyncio.wait(
            [group.task for group in candidates], return_when=asyncio.FIRST_COMPLETED
        )
        await asyncio.sleep(0)  # until the ends are noted
        done = [group for group in candidates if group.task.done()]
        return min(done, key=lambda group: group.place)
