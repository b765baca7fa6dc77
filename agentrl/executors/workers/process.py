"""One rollout process as agentrl sees it: started, asked to run attempts, watched and ended.

An attempt whose process dies has failed, like one that raised: the scheduler runs it again. A
process that does not even say that an episode took too long hangs, and is ended. It leads a group
of its own, so that Ctrl-C reaches agentrl alone; what is left of the group ends with it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import subprocess
import time
from contextlib import suppress
from typing import Any

from agentrl import event_loop
from agentrl.config import RolloutConfig
from agentrl.engines.lender import Answered, Ask, Broke, GaveUp, Lender, Sent
from agentrl.engines.pool import EnginePool
from agentrl.errors import AgentError
from agentrl.executors.attempts import CANCEL_GRACE, Member, failed_attempt
from agentrl.executors.process.frames import Outcome
from agentrl.executors.process.parent import start_child
from agentrl.executors.timed_calls import wait_through
from agentrl.executors.workers.channel import Channel
from agentrl.executors.workers.messages import (
    Begin,
    Cancel,
    Close,
    Ended,
    Failed,
    Logged,
    NewWeights,
    Ready,
    Setup,
    opened,
    sealed,
)
from agentrl.types import StopReason, Trajectory

__all__ = ["WorkerProcess"]

logger = logging.getLogger(__name__)

START_SECONDS = 300.0
"""The agent's file and the tokenizer must be loaded within this."""

EXIT_SECONDS = 5.0
"""How long a process may take to end once its socket has."""

POLL_SECONDS = 0.02

LOOK_SECONDS = 0.5
"""How often it is looked whether a process has ended whose socket somebody keeps open."""

SLACK_SECONDS = 15.0
"""Beyond what a process allows itself, for a machine that has much to do."""


class WorkerProcess:
    """One process.

    Attributes:
        ended: set when nothing of it is left.
        num_begun: attempts so far.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], pool: EnginePool, rollout: RolloutConfig
    ) -> None:
        self._process = process
        self._channel = Channel(self._take, self._lose)
        self._lender = Lender(pool, self._channel.send)
        self._close_seconds = rollout.close_timeout + CANCEL_GRACE + SLACK_SECONDS
        self._attempt_seconds = rollout.episode_timeout + self._close_seconds
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Outcome]] = {}
        self._ready: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._reaping: asyncio.Task[None] | None = None
        self._reason = ""
        self.ended = asyncio.Event()
        self.num_begun = 0

    @classmethod
    async def start(cls, setup: Setup, pool: EnginePool) -> WorkerProcess:
        """Start a process and wait until it is ready.

        Args:
            setup: what it needs to know.
            pool: the engines that its requests go to.

        Raises:
            UsageError: the agent's file or the tokenizer cannot be loaded there.
            AgentError: it could not be started, ended, or was not ready in time.
        """
        try:
            process, ours = start_child(f"{__package__}.worker")
        except OSError as error:
            raise AgentError(
                f"a rollout process could not be started ({error}): lower rollout.num_processes"
            ) from error
        worker = cls(process, pool, setup.config.rollout)
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: worker._channel, sock=ours)
        worker._look()
        worker._channel.send(setup)
        try:
            await asyncio.wait({worker._ready}, timeout=START_SECONDS)
            if not worker._ready.done():
                raise AgentError(
                    f"a rollout process was not ready within {START_SECONDS:g} s: make the import "
                    "of the agent's file faster, or set rollout.num_processes 1"
                )
            worker._ready.result().result()
        except BaseException:
            worker.kill()
            await worker.ended.wait()
            raise
        worker.note_version(pool.weight_version)
        return worker

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def serves(self) -> bool:
        """Whether it is there, as far as is known."""
        return self._reaping is None

    @property
    def num_running(self) -> int:
        """Attempts that it has been given and that have not ended."""
        return len(self._answers)

    async def run(self, member: Member, attempt: int) -> Trajectory:
        """Run an attempt there; see `Attempts.run`. One that the process does not survive failed.

        Raises:
            UsageError: raised inside the episode.
            AgentError: the example cannot travel.
        """
        number = next(self._numbers)
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._channel.send(Begin(number, sealed(member), attempt))
        self._answers[number] = answer
        self.num_begun += 1
        try:
            done, _ = await asyncio.wait({answer}, timeout=self._attempt_seconds)
            if not done:
                self._give_up()
                await asyncio.wait({answer})
        except asyncio.CancelledError:
            self._channel.send(Cancel(number))
            # The process itself says which episode did not end in time.
            await wait_through(answer, self._close_seconds)
            raise
        finally:
            del self._answers[number]
        trajectory: Trajectory = answer.result().result()
        return trajectory

    def note_version(self, version: int) -> None:
        """Tell it of new weights."""
        self._channel.send(NewWeights(version))

    def kill(self) -> None:
        """End it and all that it started, now."""
        if self._process.returncode is None:  # not reaped, so that the id is still its own
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Have it end its attempts and itself; nothing of it is left when this returns."""
        self._channel.send(Close())
        try:
            async with asyncio.timeout(self._close_seconds + event_loop.GRACE):
                await self.ended.wait()
        except TimeoutError:
            logger.warning("a rollout process did not end by itself and is killed")
            self.kill()
            await self.ended.wait()

    def describe_end(self) -> str:
        """Say how it ended."""
        code = self._process.returncode
        if code is not None and code < 0:
            return f"was ended by {signal.Signals(-code).name}{self._reason}"
        return f"ended with status {code}"

    def _give_up(self) -> None:
        """End a process that hangs, which says where on its standard error."""
        if self._reason:  # another attempt has noticed; a second signal would cut its words short
            return
        self._reason = (
            ", since it hung for long after an episode's time limit (code in `async def` must not "
            "block; where it did is said above)"
        )
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGABRT)  # its fault handler prints every stack
            asyncio.get_running_loop().call_later(EXIT_SECONDS, self.kill)

    def _take(self, message: Any) -> None:
        match message:
            case Ask() | Sent() | Answered() | Broke() | GaveUp():
                self._lender.take(message)
            case Ended(number=number, outcome=outcome):
                if (answer := self._answers.get(number)) is not None:
                    answer.set_result(_read(outcome))
            case Logged(logger=name, level=level, text=text):
                # Handlers that its own logger has were there, too, and have heard of it.
                if logging.getLogger(name).isEnabledFor(level):
                    root = logging.getLogger()
                    root.handle(root.makeRecord(name, level, "", 0, text, (), None))
            case Ready():
                self._ready.set_result(Outcome())
            case Failed(outcome=outcome):
                self._ready.set_result(outcome)

    def _look(self, has_ended: bool = False) -> None:
        """Notice its end also where something that an agent forked keeps its socket open."""
        if not self.serves:
            return
        if has_ended:  # some time ago: what it said last has been heard
            self._channel.close()
            return
        loop = asyncio.get_running_loop()
        loop.call_later(LOOK_SECONDS, self._look, _has_exited(self._process.pid))

    def _lose(self) -> None:
        self._lender.close()
        self._reaping = asyncio.create_task(self._reap())

    async def _reap(self) -> None:
        """Wait for the end of the process, end what it leaves, and tell those who wait for it."""
        try:
            deadline = time.monotonic() + EXIT_SECONDS
            while not _has_exited(self._process.pid):
                if time.monotonic() > deadline:
                    break
                await asyncio.sleep(POLL_SECONDS)
        finally:
            self.kill()
            self._process.wait()
            how = self.describe_end()
            failed = failed_attempt(StopReason.ENV_ERROR, f"the episode's rollout process {how}")
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_result(Outcome(failed))
            if not self._ready.done():
                error = AgentError(
                    f"a rollout process {how} before it was ready: see its last words above, and "
                    "whether the agent's file can be loaded by several processes at once; "
                    "rollout.num_processes 1 needs none"
                )
                self._ready.set_result(Outcome(error=error))
            self.ended.set()


def _read(outcome: bytes) -> Outcome:
    """What came of an attempt; where it cannot be made here, the attempt failed."""
    try:
        read: Outcome = opened(outcome, "what came of an episode")
    except AgentError as error:
        return Outcome(failed_attempt(StopReason.ENV_ERROR, str(error)))
    return read


def _has_exited(pid: int) -> bool:
    """Whether a child has ended; its status is still to be taken."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
