"""The gate before an engine: who may send, who is in flight, and why nobody may.

Closed while the engine is paused or asleep, so that no request meets a weight update: one that was
admitted before is written, or has ended, when the server is paused. Held while its weights are
being replaced: nobody can open it before they are whole. Condemned when what the engine holds must
not be sampled from: then every request is refused with the reason, and those in flight are ended
with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from agentrl.errors import EngineError

__all__ = ["RequestGate"]

T = TypeVar("T")


class RequestGate:
    """Admits requests to one engine and knows those in flight."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._all_sent = asyncio.Event()
        self._all_sent.set()
        self._calls: dict[str, asyncio.Future[object]] = {}
        self._unsent: set[str] = set()
        self.condemned: str | None = None
        """Why nothing may be sampled, if so."""
        self.held: str | None = None
        """Why requests must wait, if they must."""

    @property
    def shut(self) -> str | None:
        """Why the gate must not be opened, if so."""
        return self.condemned or self.held

    @property
    def in_flight(self) -> tuple[str, ...]:
        """Ids of the requests that have been sent and not answered."""
        return tuple(self._calls)

    def open(self) -> None:
        """Let requests pass."""
        self._open.set()

    def close(self) -> None:
        """Hold new requests back."""
        self._open.clear()

    def hold(self, reason: str) -> None:
        """Hold requests back, whoever wants to let them pass, until `absolve`."""
        self.held = reason
        self._open.clear()

    def condemn(self, reason: str) -> None:
        """Refuse requests, held and new, and end those in flight, until `absolve`."""
        self.condemned = reason
        for call in self._calls.values():
            call.cancel()
        self._open.set()

    def absolve(self) -> None:
        """Requests are welcome again, as soon as the gate is open."""
        self.held = None
        if self.condemned is not None:
            self.condemned = None
            self._open.clear()

    async def wait_idle(self) -> None:
        """Wait until no request is in flight."""
        await self._idle.wait()

    async def wait_sent(self) -> None:
        """Wait until every request in flight is written to the server, or has ended."""
        await self._all_sent.wait()

    def note_sent(self, request_id: str) -> None:
        """All of a request is written."""
        self._unsent.discard(request_id)
        if not self._unsent:
            self._all_sent.set()

    async def enter(self) -> None:
        """Wait until the gate is open.

        Raises:
            EngineError: the engine is condemned.
        """
        while not self._open.is_set():  # it may have closed again since it opened
            await self._open.wait()
        if self.condemned is not None:
            raise EngineError(f"the engine takes no requests: {self.condemned}")

    async def run(self, request_id: str, call: Awaitable[T]) -> T:
        """Await one request that has entered, and of which `note_sent` tells when it is written.

        Raises:
            EngineError: the engine was condemned meanwhile.
        """
        future = asyncio.ensure_future(call)
        self._calls[request_id] = future  # type: ignore[assignment]
        self._unsent.add(request_id)
        self._idle.clear()
        self._all_sent.clear()
        try:
            return await future
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.condemned is not None and not (task is not None and task.cancelling()):
                raise EngineError(f"the request was given up: {self.condemned}") from None
            raise
        finally:
            future.cancel()
            self.note_sent(request_id)
            del self._calls[request_id]
            if not self._calls:
                self._idle.set()
