"""Attempts in several processes: each goes to the one that has the least to do.

Requests of a group find their prefix wherever its members run, since the engines are chosen here
(see `lender`). A process that dies is replaced; one that cannot be started ends the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from agentrl.config import Config
from agentrl.engines.pool import EnginePool
from agentrl.errors import AgentRLError
from agentrl.executors.attempts import Attempts, Member
from agentrl.executors.workers.messages import Setup
from agentrl.executors.workers.process import WorkerProcess
from agentrl.types import Trajectory

__all__ = ["ProcessAttempts"]

logger = logging.getLogger(__name__)


class ProcessAttempts(Attempts):
    """Runs attempts in `rollout.num_processes` processes.

    Args:
        config: the whole run.
        pool: the engines that their requests go to.
        end_token_ids: the end-of-turn tokens that the model's generation config names.
    """

    def __init__(self, config: Config, pool: EnginePool, end_token_ids: Sequence[int]) -> None:
        self._config, self._pool = config, pool
        self._end_token_ids = tuple(end_token_ids)
        self._workers: list[WorkerProcess] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._failure: AgentRLError | None = None

    @property
    def workers(self) -> Sequence[WorkerProcess]:
        """The processes that run attempts now."""
        return [worker for worker in self._workers if worker.serves]

    async def start(self) -> None:
        """Start all processes. `close` ends those that there are, also after a failure.

        Raises:
            UsageError: the agent's file or the tokenizer cannot be loaded in one.
            AgentError: one ended, or was not ready in time.
        """
        self._pool.version_listeners.append(self._note_version)
        try:
            async with asyncio.TaskGroup() as starting:
                for _ in range(self._config.rollout.num_processes):
                    starting.create_task(self._start_one())
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        self._keepers = [asyncio.create_task(self._keep(worker)) for worker in self._workers]

    async def run(self, member: Member, attempt: int) -> Trajectory:
        """Run an attempt in one of the processes; see `Attempts.run`."""
        worker = await self._least_busy()
        return await worker.run(member, attempt)

    async def close(self) -> None:
        """End all processes; nothing of them is left when this returns."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in self._workers))
        self._workers.clear()
        if self._note_version in self._pool.version_listeners:
            self._pool.version_listeners.remove(self._note_version)

    async def _least_busy(self) -> WorkerProcess:
        while True:
            if self._failure is not None:
                raise self._failure
            if workers := self.workers:
                return min(workers, key=lambda worker: (worker.num_running, worker.num_begun))
            await self._changed.wait()

    async def _keep(self, worker: WorkerProcess) -> None:
        """Start another process whenever one has died."""
        while True:
            await worker.ended.wait()
            self._workers.remove(worker)
            logger.error("a rollout process %s: another takes its place", worker.describe_end())
            try:
                worker = await self._start_one()
            except AgentRLError as error:
                self._failure = error
                return
            finally:
                changed, self._changed = self._changed, asyncio.Event()
                changed.set()

    async def _start_one(self) -> WorkerProcess:
        level = logging.getLogger().getEffectiveLevel()
        setup = Setup(self._config, self._end_token_ids, self._pool.engines[0].route, level)
        worker = await WorkerProcess.start(setup, self._pool)
        self._workers.append(worker)
        return worker

    def _note_version(self, version: int) -> None:
        for worker in self.workers:
            worker.note_version(version)
