"""Ctrl-C and SIGTERM: the first asks for an orderly end, the second ends now."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from agentrl.errors import AgentRLError

__all__ = ["Interrupted", "StopRequest", "ignore_first_signal", "stop_on_signal"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(AgentRLError):
    """The run was asked to stop, and saved what it had. Exit status 128 + the signal."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.exit_status = 128 + signum


class StopRequest:
    """Whether somebody asked the run to end after this step, and by which signal."""

    signum: int | None = None


@contextmanager
def stop_on_signal(notice: str) -> Iterator[StopRequest]:
    """Note the first Ctrl-C or SIGTERM, and say `notice`; raise `KeyboardInterrupt` at the second.

    Outside the main thread, where Python delivers no signals, nothing is installed.
    """
    request = StopRequest()

    def handle(signum: int, frame: FrameType | None) -> None:
        if request.signum is not None:
            raise KeyboardInterrupt
        request.signum = signum
        # Not print: a signal may arrive in the middle of one, whose buffer cannot be entered twice.
        os.write(2, f"\nagentrl: {notice}\n".encode())

    with _handlers(handle):
        yield request


@contextmanager
def ignore_first_signal() -> Iterator[None]:
    """On the ranks that follow rank 0: it decides when the run ends; a second signal ends now."""
    seen = False

    def handle(signum: int, frame: FrameType | None) -> None:
        nonlocal seen
        if seen:
            raise KeyboardInterrupt
        seen = True

    with _handlers(handle):
        yield


@contextmanager
def _handlers(handle: object) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signum: signal.signal(signum, handle) for signum in _SIGNALS}  # type: ignore[arg-type]
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
