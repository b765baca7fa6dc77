"""The processes of environments, as agentrl sees them: forked, watched and ended on demand.

The nursery that forks them is started when the first one is wanted, and again when it died.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

from agentrl.errors import AgentError
from agentrl.executors.process.frames import CANCEL, MESSAGE_BYTES, Outcome, take_frames, to_bytes
from agentrl.executors.process.parent import start_child
from agentrl.executors.process.places import EnvHost, EnvPlace
from agentrl.executors.process.recipe import Recipe

__all__ = ["EnvProcess", "ProcessHost"]

START_SECONDS = 60.0
"""The agent's file must be loaded within this."""

END_SECONDS = 5.0
"""How long the end of a process may take to be known, once its connection has ended."""

MOST_FORKS = 16
"""Ordered at once: the nursery makes them one after another, and its socket holds few messages."""

RETRY_SECONDS = 0.05
"""After which an order is given again that the socket had no room for."""


class EnvProcess(asyncio.Protocol, EnvPlace):
    """One process, with its connection.

    Not a stream that a task reads: where all tasks are cancelled at once, as at the end of an event
    loop, `close` must still be answered.

    Attributes:
        ended: its exit status, as `os.waitpid` gives it, once it has one.
    """

    def __init__(self, ended: asyncio.Future[int], kill: Callable[[], None]) -> None:
        self.ended, self._kill = ended, kill
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._answers: deque[asyncio.Future[Outcome]] = deque()

    async def call(self, method: str, *arguments: Any) -> Any:
        """As `EnvPlace.call` says."""
        frame = to_bytes((method, arguments))
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        try:
            if self._transport is None or self._transport.is_closing():
                raise EOFError
            self._answers.append(answer)
            self._transport.write(frame)
            outcome = await answer
        except asyncio.CancelledError:
            if self._transport is not None:
                self._transport.write(to_bytes(CANCEL))
            raise
        except EOFError as error:
            raise AgentError(
                f"the environment's process {await self._how_it_ended()} during {method}"
            ) from error
        return outcome.result()

    @property
    def has_ended(self) -> bool:
        """Whether it is gone."""
        return self.ended.done()

    def kill(self) -> None:
        """End it and what it started."""
        if self._transport is not None:
            self._transport.close()
        self._kill()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The process is forked."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Give the answers that are whole to those who wait."""
        self._received += data
        for outcome in take_frames(self._received):
            # One who gave up waits no more, but the answer is to that call all the same.
            if not (answer := self._answers.popleft()).done():
                answer.set_result(outcome)

    def connection_lost(self, exc: Exception | None) -> None:
        """No other answer will come."""
        for answer in self._answers:
            if not answer.done():
                answer.set_exception(EOFError())

    async def _how_it_ended(self) -> str:
        done, _ = await asyncio.wait({self.ended}, timeout=END_SECONDS)
        if not done:
            return "closed its connection"
        code = os.waitstatus_to_exitcode(self.ended.result())
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"ended with status {code}"


class ProcessHost(EnvHost):
    """Forks and ends the processes of one agent's environments."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self._recipe = recipe
        self._numbers = itertools.count()
        self._nursery: _NurseryLink | None = None
        self._starting = asyncio.Lock()

    async def fork(self) -> EnvProcess:
        """A new process, in which no instance is built yet.

        Raises:
            AgentError: the agent's file cannot be loaded there, or the nursery died.
        """
        async with self._starting:
            if self._nursery is None or self._nursery.closed:
                self._nursery = await _NurseryLink.start(self._recipe)
        return await self._nursery.fork(next(self._numbers))

    async def close(self) -> None:
        """End all processes; nothing of them is left when this returns."""
        await super().close()
        if self._nursery is not None:
            await self._nursery.close()
            self._nursery = None


class _NurseryLink:
    """The nursery's process and the socket to it."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._process, self._control = process, control
        self._loop = asyncio.get_running_loop()
        self._forked: dict[int, asyncio.Future[None]] = {}
        """Processes that are being forked."""
        self._ended: dict[int, asyncio.Future[int]] = {}
        """Living processes: their exit status to come."""
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._few = asyncio.Semaphore(MOST_FORKS)
        self.closed = False
        self._loop.add_reader(control, self._hear)

    @classmethod
    async def start(cls, recipe: Recipe) -> _NurseryLink:
        """Start it, and wait until the agent's file is loaded."""
        process, control = start_child(f"{__package__}.nursery", socket.SOCK_SEQPACKET)
        control.setblocking(False)
        link = cls(process, control)
        link._control.send(json.dumps(asdict(recipe)).encode())
        try:
            async with asyncio.timeout(START_SECONDS):
                await link._ready
        except BaseException as error:
            await link.close()
            if isinstance(error, TimeoutError):
                raise AgentError(
                    "the agent's file was not loaded in the environments' process within "
                    f"{START_SECONDS:g} s: make its import faster"
                ) from error
            raise
        return link

    async def fork(self, number: int) -> EnvProcess:
        """Fork a process for one instance; raises `AgentError` when the nursery is gone."""
        ours, theirs = socket.socketpair()
        ended = self._loop.create_future()
        try:
            async with self._few:
                await self._order_fork(number, theirs, ended)
        except OSError as error:
            ours.close()
            raise AgentError(f"no process could be forked ({error}): try again") from error
        except BaseException:
            ours.close()
            raise
        _, process = await self._loop.create_unix_connection(
            lambda: EnvProcess(ended, partial(self.kill, number)), sock=ours
        )
        return process

    async def _order_fork(
        self, number: int, theirs: socket.socket, ended: asyncio.Future[int]
    ) -> None:
        forked = self._forked[number] = self._loop.create_future()
        try:
            with theirs:
                socket.send_fds(
                    self._control, [json.dumps({"fork": number}).encode()], [theirs.fileno()]
                )
            self._ended[number] = ended
            await forked
        finally:
            del self._forked[number]

    def kill(self, number: int) -> None:
        """End a process, if it has not ended yet."""
        if number not in self._ended:
            return
        try:
            self._control.send(json.dumps({"kill": number}).encode())
        except BlockingIOError:  # it has much to do
            self._loop.call_later(RETRY_SECONDS, self.kill, number)
        except OSError:
            pass  # it is gone, and with it all processes

    async def close(self) -> None:
        """Close the socket, upon which the nursery ends all processes and itself."""
        if not self.closed:
            self._lose("was closed")
        await asyncio.to_thread(self._process.wait)

    def _hear(self) -> None:
        try:
            message = self._control.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self._lose("ended")
            return
        match json.loads(message):
            case {"failed": why}:
                if not self._ready.done():
                    self._ready.set_exception(AgentError(why))
            case {"ready": _}:
                if not self._ready.done():
                    self._ready.set_result(None)
            case {"forked": number}:
                if (forked := self._forked.get(number)) is not None and not forked.done():
                    forked.set_result(None)
            case {"ended": number, "status": status}:
                self._ended.pop(number).set_result(status)

    def _lose(self, how: str) -> None:
        """Nothing more will be heard."""
        self.closed = True
        self._loop.remove_reader(self._control)
        self._control.close()
        error = AgentError(
            f"the process that environments are forked from {how}: see its last words above"
        )
        waiting: list[asyncio.Future[Any]] = [self._ready, *self._forked.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(error)
        if not self._ready.cancelled():
            self._ready.exception()  # seen: nobody may wait for it
        for ended in self._ended.values():
            ended.set_result(signal.SIGKILL)
        self._ended.clear()
