"""Time limits for the calls of one instance, wherever they run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

from agentrl.config import RolloutConfig
from agentrl.errors import AgentTimeoutError
from agentrl.executors.close_faults import CloseFaults

__all__ = ["TimedCalls", "wait_through"]

T = TypeVar("T")


async def wait_through(ending: asyncio.Future[Any], seconds: float) -> None:
    """Wait until `ending` is done, for at most so long, however often this is cancelled meanwhile.
    The cancellation goes on afterwards."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    interrupted: asyncio.CancelledError | None = None
    while not ending.done() and loop.time() < deadline:
        try:
            await asyncio.wait({ending}, timeout=deadline - loop.time())
        except asyncio.CancelledError as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted


class TimedCalls:
    """Awaits the calls of one instance within the limits of the run.

    Args:
        class_name: of the instance, for messages.
        rollout: the time limits.
        name: of the episode, for messages.
        close_faults: of the run, told what `close` does wrong.

    Attributes:
        seconds: spent in the instance so far, `close` left out.
        hung: whether a call did not return in time.
    """

    def __init__(
        self, class_name: str, rollout: RolloutConfig, name: str, close_faults: CloseFaults
    ) -> None:
        self._class_name = class_name
        self._rollout = rollout
        self._name = name
        self._close_faults = close_faults
        self.seconds = 0.0
        self.hung = False

    async def limit(self, call: Awaitable[T], method: str) -> T:
        """Await `call` within the limit of `method`.

        Raises:
            AgentTimeoutError: it took longer.
        """
        setting = "step_timeout" if method == "step" else "reset_timeout"
        seconds: float = getattr(self._rollout, setting)
        begun = time.perf_counter()
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await call
        except TimeoutError as error:
            if not limit.expired():
                raise
            self.hung = True
            raise AgentTimeoutError(
                f"{self._class_name}.{method} did not return within {seconds:g} s: make it "
                f"faster, or raise rollout.{setting}"
            ) from error
        finally:
            self.seconds += time.perf_counter() - begun

    async def finish(self, closing: asyncio.Future[None]) -> bool:
        """Wait for `close`, through cancellations, for at most `rollout.close_timeout`.

        What `close` does wrong is logged: the episode's result stands. Cancellation goes on
        afterwards.

        Returns:
            Whether `close` returned, or raised.
        """
        try:
            await wait_through(closing, self._rollout.close_timeout)
        finally:
            where = f"{self._class_name}.close of episode {self._name!r}"
            is_done = closing.done()
            if not is_done:
                closing.cancel()
                self._close_faults.hung(where, self._rollout.close_timeout)
            elif not closing.cancelled() and (failure := closing.exception()) is not None:
                self._close_faults.raised(where, failure)
        return is_done
