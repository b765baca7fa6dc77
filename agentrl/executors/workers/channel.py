"""One end of the socket between agentrl and a rollout process: whole messages, in their order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from agentrl.executors.process.frames import take_frames, to_bytes

__all__ = ["Channel"]


class Channel(asyncio.Protocol):
    """Gives messages as they arrive, and takes them without waiting.

    Not a stream that a task reads: where all tasks are cancelled at once, as at the end of an event
    loop, episodes must still be closed.

    Args:
        take: called with each message.
        lost: called once, when no other will come.
    """

    def __init__(self, take: Callable[[Any], None], lost: Callable[[], None]) -> None:
        self._take, self._lost = take, lost
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()

    def send(self, message: object) -> None:
        """Send a message, unless the other side has gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(to_bytes(message))

    def close(self) -> None:
        """Take and send nothing more."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is connected."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Hand on the messages that are whole."""
        self._received += data
        for message in take_frames(self._received):
            self._take(message)

    def connection_lost(self, exc: Exception | None) -> None:
        """The other side has gone."""
        self._lost()
