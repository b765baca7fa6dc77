"""What travels between agentrl and a process of its own: pickled values, length first.

A call to an environment is `(method, arguments)`. The answer is an `Outcome`. `CANCEL` asks to
cancel the call that is running, as far as a coroutine can be; it is answered like any other. Both
sides run the same code for the same user, so that pickle gives away nothing.
"""

from __future__ import annotations

import pickle
import socket
import struct
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from agentrl.errors import AgentError

__all__ = [
    "CANCEL",
    "MESSAGE_BYTES",
    "Outcome",
    "RemoteTraceback",
    "pickled",
    "receive",
    "take_frames",
    "to_bytes",
    "unpickled",
]

CANCEL = "cancel"

MESSAGE_BYTES = 1 << 16
"""No message of the control socket is longer."""

_LENGTH = struct.Struct("!Q")


class RemoteTraceback(Exception):
    """The cause of an exception that came out of another process: its traceback there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a call: a value, or an exception with its traceback as text."""

    value: Any = None
    error: BaseException | None = None
    traceback: str = ""

    @classmethod
    def failed(cls, error: BaseException) -> Outcome:
        """Keep an exception, or say what it was where it cannot travel."""
        text = "".join(traceback.format_exception(error))
        try:
            pickle.loads(pickle.dumps(error))
        except Exception as reason:  # noqa: BLE001 - a class of the user's may raise anything
            error = AgentError(
                f"{type(error).__name__}: {error} (raised in another process, and cannot be "
                f"pickled: {reason})"
            )
        return cls(error=error, traceback=text)

    def to_bytes(self) -> bytes:
        """One frame: of the outcome, or of why its value cannot travel."""
        try:
            return to_bytes(self)
        except AgentError as error:
            return to_bytes(Outcome.failed(error))

    def result(self) -> Any:
        """The value; raises the exception, with the traceback there as its cause."""
        if self.error is not None:
            raise self.error from RemoteTraceback(self.traceback)
        return self.value


def pickled(value: object, remedy: str) -> bytes:
    """A value as bytes. `remedy` is what to do about one that cannot travel.

    Raises:
        AgentError: it cannot be pickled.
    """
    try:
        return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # an object of the user's may raise anything
        raise AgentError(
            f"{value!r:.200} cannot travel between processes ({error}): {remedy}"
        ) from error


def unpickled(body: bytes, what: str, remedy: str) -> Any:
    """The value that became these bytes. `what` and `remedy` are for one that cannot travel.

    Raises:
        AgentError: it cannot be made again here.
    """
    try:
        return pickle.loads(body)
    except Exception as error:  # an object of the user's may raise anything
        raise AgentError(
            f"{what} cannot travel between processes ({type(error).__name__} while it was made "
            f"again: {error}): {remedy}"
        ) from error


def to_bytes(
    value: object, remedy: str = "return plain values, or set rollout.env_backend thread"
) -> bytes:
    """One frame. `remedy` is what to do about a value that cannot travel.

    Raises:
        AgentError: the value cannot be pickled.
    """
    body = pickled(value, remedy)
    return _LENGTH.pack(len(body)) + body


def receive(connection: socket.socket) -> Any:
    """The next frame; None at the end of the stream."""
    head = _read(connection, _LENGTH.size)
    if head is None:
        return None
    body = _read(connection, _LENGTH.unpack(head)[0])
    return None if body is None else pickle.loads(body)


def take_frames(received: bytearray) -> Iterator[Any]:
    """The frames that `received` begins with; they are removed from it."""
    while len(received) >= _LENGTH.size:
        end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
        if len(received) < end:
            return
        body = bytes(received[_LENGTH.size : end])
        del received[:end]
        yield pickle.loads(body)


def _read(connection: socket.socket, size: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)
