"""A rollout process: it runs attempts, and sends their requests to the servers itself.

It is given its end of a socket to agentrl; see `messages` for what is said. It has no servers,
weights, retries or groups: those are agentrl's. When the socket closes it ends its attempts, so
that their instances are closed, and itself; when agentrl dies it is killed.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import socket
import sys
import traceback
from functools import partial
from typing import Any, NoReturn

from agentrl import event_loop, heap
from agentrl.engines.borrower import BorrowedEngine
from agentrl.engines.lender import Granted, Refused
from agentrl.errors import AgentError, AgentRLError
from agentrl.executors.attempts import CANCEL_GRACE, Attempts, Member, failed_attempt
from agentrl.executors.base import AgentExecutor
from agentrl.executors.build import local_attempts
from agentrl.executors.process.frames import Outcome, receive, to_bytes
from agentrl.executors.process.parent import die_with_parent
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
from agentrl.models.load import load_tokenizer
from agentrl.plugin import load_agent
from agentrl.types import StopReason, Trajectory

__all__ = ["main"]


def main(descriptor: int) -> NoReturn:
    """Serve a socket until it closes; then end the process."""
    try:
        _serve(descriptor)
        status = 0
    except BaseException:  # noqa: BLE001 - the edge of the process; an agent's task may exit, too
        traceback.print_exc()
        status = 1
    # Not `sys.exit`: threads that hang in the agent's code must not keep the process.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _serve(descriptor: int) -> None:
    die_with_parent()
    # agentrl hears of Ctrl-C, and says what is to end. SIG_IGN would be inherited by what an agent
    # starts.
    signal.signal(signal.SIGINT, lambda *_: None)
    faulthandler.enable()
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    setup: Setup | None = receive(connection)
    if setup is None:
        return
    try:
        worker = _Worker(setup)
    except AgentRLError as error:
        connection.sendall(to_bytes(Failed(Outcome.failed(error))))
        return
    heap.freeze(worker)
    event_loop.run(worker.serve(connection))


class _Worker:
    """The attempts of this process."""

    def __init__(self, setup: Setup) -> None:
        config = setup.config
        self._setup = setup
        self._close_seconds = config.rollout.close_timeout + CANCEL_GRACE
        self._executor: AgentExecutor = load_agent(config.agent).make_executor(
            config.rollout, config.data, probe=False
        )
        self._channel = Channel(self._take, self._end)
        self._engine = BorrowedEngine(
            setup.route, self._channel.send, api_key=config.engine.api_key
        )
        tokenizer = load_tokenizer(config.model)
        self._attempts: Attempts = local_attempts(
            config, self._executor, self._engine, tokenizer, setup.end_token_ids
        )
        self._running: dict[int, asyncio.Task[Trajectory]] = {}
        self._over = asyncio.Event()

    async def serve(self, connection: socket.socket) -> None:
        """Until there is nothing more to do; every instance is closed then."""
        loop = asyncio.get_running_loop()
        await loop.create_unix_connection(lambda: self._channel, sock=connection)
        # agentrl has loaded the agent's file, too, and with it what the file adds here.
        root = logging.getLogger()
        root.setLevel(self._setup.log_level)
        root.handlers[:] = [_ToParent(self._channel, loop)]
        self._channel.send(Ready())
        try:
            await self._over.wait()
        except asyncio.CancelledError:  # an agent's code has ended the event loop
            self._channel.close()  # so that no attempt is blamed twice, for this and for the next
            raise
        for task in self._running.values():
            task.cancel()
        if self._running:
            await asyncio.wait(self._running.values(), timeout=self._close_seconds)
        await self._executor.close()
        await self._engine.close()
        root.handlers.clear()  # nobody would hear of what is said from here on

    def _end(self) -> None:
        self._over.set()

    def _take(self, message: Any) -> None:
        match message:
            case Granted() | Refused():
                self._engine.take(message)
            case Begin(number=number):
                self._running[number] = asyncio.create_task(self._run(message))
                self._running[number].add_done_callback(partial(self._tell, number))
            case Cancel(number=number):
                if (running := self._running.get(number)) is not None:
                    running.cancel()
            case NewWeights(version=version):
                self._engine.note_version(version)
            case Close():
                self._end()

    async def _run(self, begin: Begin) -> Trajectory:
        member: Member = opened(begin.member, "an example")
        return await self._attempts.run(member, begin.attempt)

    def _tell(self, number: int, attempt: asyncio.Task[Trajectory]) -> None:
        """Say what came of an attempt."""
        del self._running[number]
        if attempt.cancelled():
            outcome = Outcome(failed_attempt(StopReason.CANCELLED, "the attempt was cancelled"))
        elif (error := attempt.exception()) is not None:
            outcome = Outcome.failed(error)
        else:
            outcome = Outcome(attempt.result())
        try:
            body = sealed(outcome)
        except AgentError as error:
            body = sealed(Outcome(failed_attempt(StopReason.ENV_ERROR, str(error))))
        self._channel.send(Ended(number, body))


class _ToParent(logging.Handler):
    """Logs where agentrl logs. Records come from any thread."""

    def __init__(self, channel: Channel, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._channel, self._loop = channel, loop

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record. One that is wrong in itself ends nothing, as with every handler."""
        try:
            logged = Logged(record.name, record.levelno, self.format(record))
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._channel.send, logged)
        except Exception:  # noqa: BLE001 - a message of the user's may raise anything
            self.handleError(record)
