"""`asyncio.run` that ends: whatever an agent does, nothing waits for it for ever.

`asyncio.run` waits at its end until every task has let its cancellation pass and every thread of
the default executor is done, and so does the interpreter's exit. Code that swallows
`CancelledError`, or a call that hangs in a thread, would keep the process alive. Here both get a
time, and are then left behind: the threads are daemons, which end with the process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

__all__ = ["GRACE", "run"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ASYNCIO = f"{os.path.dirname(asyncio.__file__)}{os.sep}"

GRACE = 5.0
"""Seconds that tasks and threads have to end once the main coroutine has."""

_left_behind: list[object] = []
"""Held, because to collect a task is to throw into its coroutine once more."""


def run(main: Coroutine[Any, Any, T], grace: float = GRACE) -> T:
    """Run `main` on a new event loop, as `asyncio.run` does, and end within `grace` seconds of it.

    The first Ctrl-C cancels `main`, unless the process has a handler of its own. A
    `KeyboardInterrupt` goes through after the same `grace`.

    Args:
        main: what to run.
        grace: seconds that the tasks and threads it leaves have to end before they are left behind.
    """
    threads = _DaemonThreads()
    runner = asyncio.Runner()
    loop = runner.get_loop()
    loop.set_default_executor(threads)
    try:
        # Closing the runner, too, would wait for all tasks: `_wind_down` does what it does.
        return runner.run(main)
    finally:
        try:
            _wind_down(loop, threads, time.monotonic() + grace, grace)
        finally:
            asyncio.set_event_loop(None)
            loop.close()


def _wind_down(
    loop: asyncio.AbstractEventLoop, threads: _DaemonThreads, deadline: float, grace: float
) -> None:
    """Cancel what is left, wait until `deadline`, and say what did not end."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    stubborn = _wait_for(loop, tasks, deadline)
    for task in tasks - stubborn:
        if not task.cancelled() and (failure := task.exception()) is not None:
            logger.warning("%s failed while it was cancelled", _describe(task), exc_info=failure)
    generators = loop.create_task(loop.shutdown_asyncgens())
    stubborn |= _wait_for(loop, {generators}, deadline)
    if stubborn:
        logger.warning(
            "%d tasks went on for %g s after they were cancelled and are left behind: an agent "
            "must let asyncio.CancelledError pass (%s)",
            len(stubborn),
            grace,
            "; ".join(sorted(map(_describe, stubborn))),
        )
        _left_behind.extend((loop, *stubborn))
        # All is said; asyncio would complain of each again when the process ends.
        loop.set_exception_handler(lambda loop, context: None)
    hung = wait(threads.unfinished, timeout=max(0.0, deadline - time.monotonic())).not_done
    if hung:
        logger.warning(
            "%d calls in threads (asyncio.to_thread) did not return within %g s and are left "
            "behind: give them a time limit of their own",
            len(hung),
            grace,
        )


def _wait_for(
    loop: asyncio.AbstractEventLoop, tasks: set[asyncio.Task[Any]], deadline: float
) -> set[asyncio.Task[Any]]:
    """Wait for `tasks` until `deadline`; those that did not end."""
    if not tasks:
        return set()
    left = max(0.0, deadline - time.monotonic())
    return loop.run_until_complete(asyncio.wait(tasks, timeout=left))[1]


def _describe(task: asyncio.Task[Any]) -> str:
    """A task's name and the line, outside asyncio, at which it waits."""
    where = ""
    waiting: Any = task.get_coro()
    while (frame := getattr(waiting, "cr_frame", None)) is not None:
        if not frame.f_code.co_filename.startswith(_ASYNCIO):
            where = f" at {frame.f_code.co_filename}:{frame.f_lineno}"
        waiting = waiting.cr_await
    return f"{task.get_name()}{where}"


class _DaemonThreads(ThreadPoolExecutor):
    """An executor whose threads are daemons; asyncio takes none that is not a `ThreadPoolExecutor`,
    whose own threads the interpreter waits for at its exit.

    Attributes:
        unfinished: calls that have not returned yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self._free = min(32, (os.cpu_count() or 1) + 4)
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._guard = threading.Lock()
        self.unfinished: set[Future[Any]] = set()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run `fn` in the next free thread."""
        future: Future[Any] = Future()
        self.unfinished.add(future)
        future.add_done_callback(self.unfinished.discard)
        with self._guard:
            self._waiting.append((future, lambda: fn(*args, **kwargs)))
            start = self._free > 0
            self._free -= start
        if start:
            threading.Thread(target=self._work, name="agentrl worker", daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            with self._guard:
                if not self._waiting:
                    self._free += 1
                    return
                future, call = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # noqa: BLE001 - handed to whoever awaits it
                    future.set_exception(error)
            del future, call
