"""An event loop that somebody watches from outside.

A coroutine that blocks (`time.sleep` in an `async def`) stops every time limit that lives on the
loop, so the limit has to be kept by another thread.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl import event_loop

__all__ = ["Stall", "WatchedLoop"]

BEAT = 0.02
"""Seconds between two signs of life."""


@dataclass(frozen=True, slots=True)
class Stall:
    """The loop stood still from `started` to `ended` (seconds of `time.perf_counter`)."""

    started: float
    ended: float

    @property
    def seconds(self) -> float:
        """How long."""
        return self.ended - self.started


class WatchedLoop:
    """Runs one coroutine on a loop in a daemon thread.

    Args:
        min_stall: stalls shorter than this many seconds are not recorded.
        max_stall: a loop that stands still for longer is given up.

    Attributes:
        stalls: when the loop stood still and went on again.
    """

    def __init__(self, *, min_stall: float, max_stall: float) -> None:
        self._min_stall = min_stall
        self._max_stall = max_stall
        self._last_beat = time.perf_counter()
        self._task: asyncio.Task[None] | None = None
        self.stalls: list[Stall] = []

    def run(self, main: Coroutine[Any, Any, None], file: Path) -> str | None:
        """Run `main` to its end.

        Returns:
            None when it ended; where in `file` the thread stands if the loop was given up.
        """
        thread = threading.Thread(target=self._run, args=(main,), daemon=True)
        thread.start()
        try:
            while not self._is_done():
                thread.join(BEAT)
                late = self._last_beat < time.perf_counter() - self._max_stall
                if late and not self._is_done():
                    return _position(thread, file)
        except KeyboardInterrupt:
            if self._task is not None:
                self._task.get_loop().call_soon_threadsafe(self._task.cancel)
                thread.join(self._max_stall)
            raise
        thread.join(event_loop.GRACE)  # what `main` left behind is being cancelled
        if self._task is not None:
            self._task.result()
        return None

    def _is_done(self) -> bool:
        return self._task is not None and self._task.done()

    def _run(self, main: Coroutine[Any, Any, None]) -> None:
        async def supervised() -> None:
            self._task = asyncio.create_task(main)
            beat = asyncio.create_task(self._beat())
            await asyncio.wait({self._task})
            beat.cancel()

        event_loop.run(supervised())

    async def _beat(self) -> None:
        while True:
            self._last_beat = time.perf_counter()
            await asyncio.sleep(BEAT)
            now = time.perf_counter()
            if now - self._last_beat - BEAT > self._min_stall:
                self.stalls.append(Stall(self._last_beat, now))


def _position(thread: threading.Thread, file: Path) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    stack = traceback.extract_stack(frame)
    own = [entry for entry in stack if entry.filename == str(file)]
    entry = own[-1] if own else stack[-1]
    return f"line {entry.lineno} of {entry.filename} ({entry.line})"
