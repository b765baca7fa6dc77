"""Calls the methods of one instance: each where it belongs, within its time limit, `close` once.

`async def` methods run on the event loop, without a thread in between. Plain `def` methods run in a
thread of the instance's own, always the same one, so that a blocking environment stops nobody else
and may keep thread-bound state (a database handle, a simulator). Where an instance has such a
method it is also built in that thread. A call that hangs is left behind in its thread, which is a
daemon; its `close` runs there if the call ever returns.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from agentrl.config import RolloutConfig
from agentrl.executors.base import AgentInstance
from agentrl.executors.close_faults import CloseFaults
from agentrl.executors.timed_calls import TimedCalls
from agentrl.types import Action

__all__ = ["InstanceRunner"]

_METHODS = ("reset", "step", "close")


class InstanceRunner:
    """One episode's instance.

    Args:
        instance_class: built without arguments by `build`.
        rollout: the time limits.
        name: of the episode, for messages.
        close_faults: of the run, told what `close` does wrong.
    """

    def __init__(
        self,
        instance_class: type[AgentInstance],
        rollout: RolloutConfig,
        *,
        name: str = "",
        close_faults: CloseFaults | None = None,
    ) -> None:
        self._class = instance_class
        self._calls = TimedCalls(
            instance_class.__name__, rollout, name, close_faults or CloseFaults()
        )
        self._blocking = frozenset(
            method for method in _METHODS if _is_blocking(instance_class, method)
        )
        self._thread = _InstanceThread(name) if self._blocking else None
        self._instance: AgentInstance | None = None
        self._hung = False

    @property
    def seconds(self) -> float:
        """Spent in the instance so far."""
        return self._calls.seconds

    async def build(self) -> None:
        """Build the instance.

        Raises:
            AgentTimeoutError: the constructor took longer than `rollout.reset_timeout`.
        """
        if inspect.iscoroutinefunction(self._class.__init__):
            # Older OpenRLHF files write `async def __init__`, which calling the class refuses.
            instance = self._class.__new__(self._class)
            construct: Callable[..., Any] = self._class.__init__
            await self._limit(construct, instance, method="__init__", blocking=False)
            self._instance = instance
        else:
            blocking = self._thread is not None
            await self._limit(self._construct, method="__init__", blocking=blocking)

    async def reset(self, *args: Any) -> Any:
        """Call `reset`; its value.

        Raises:
            AgentTimeoutError: it took longer than `rollout.reset_timeout`.
        """
        return await self._call("reset", *args)

    async def step(self, action: Action | dict[str, Any]) -> Any:
        """Call `step`; its value.

        Raises:
            AgentTimeoutError: it took longer than `rollout.step_timeout`.
        """
        return await self._call("step", action)

    async def close(self) -> None:
        """Close the instance, if it was built, and end its thread. Called once.

        Whatever `close` itself does wrong is logged: the episode's result stands. Cancellation
        waits for `close`, for at most `rollout.close_timeout`.
        """
        try:
            if self._instance is None or (self._hung and "close" in self._blocking):
                # Whatever still runs in the thread is followed by close, if it ever ends.
                if self._thread is not None:
                    self._thread.call(self._close_if_built)
            elif _is_defined(self._class, "close"):
                await self._calls.finish(asyncio.ensure_future(self._invoke("close")))
        finally:
            if self._thread is not None:
                self._thread.stop()

    def _construct(self) -> None:
        self._instance = self._class()

    def _close_if_built(self) -> None:
        if self._instance is not None:
            closing = self._instance.close()
            if inspect.iscoroutine(closing):
                asyncio.run(closing)

    async def _call(self, method: str, *args: Any) -> Any:
        function = getattr(self._instance, method)
        return await self._limit(function, *args, method=method, blocking=method in self._blocking)

    async def _limit(
        self, function: Callable[..., Any], *args: Any, method: str, blocking: bool
    ) -> Any:
        """Call `function` within the limit of `method`, in the thread if it blocks."""
        try:
            return await self._calls.limit(self._run(function, *args, blocking=blocking), method)
        finally:
            self._hung |= blocking and self._calls.hung

    async def _invoke(self, method: str) -> None:
        await self._run(getattr(self._instance, method), blocking=method in self._blocking)

    async def _run(self, function: Callable[..., Any], *args: Any, blocking: bool) -> Any:
        if blocking and self._thread is not None:
            value = await asyncio.wrap_future(self._thread.call(function, *args))
        else:
            value = function(*args)
        return await value if inspect.isawaitable(value) else value


class _InstanceThread:
    """A daemon thread that runs calls one after another until it is stopped."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        threading.Thread(target=self._work, name=f"agent {name}", daemon=True).start()

    def call(self, function: Callable[..., Any], *args: Any) -> concurrent.futures.Future[Any]:
        """Run `function(*args)` in the thread, after what was given before."""
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._calls.put((future, function, args))
        return future

    def stop(self) -> None:
        """End the thread when all calls have run."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function, args = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(*args))
            except StopIteration as error:
                # A future cannot carry StopIteration: whoever awaits it would wait for ever.
                future.set_exception(RuntimeError(f"{function.__qualname__} raised {error!r}"))
            except BaseException as error:  # noqa: BLE001 - handed to the episode that awaits it
                future.set_exception(error)
            # Nothing of the episode stays alive while the thread waits.
            del call, future, function, args


_Call = tuple[concurrent.futures.Future[Any], Callable[..., Any], tuple[Any, ...]]


def _is_defined(cls: type[AgentInstance], method: str) -> bool:
    """True where the class has a `method` other than the base's."""
    return getattr(cls, method) is not getattr(AgentInstance, method)


def _is_blocking(cls: type[AgentInstance], method: str) -> bool:
    return _is_defined(cls, method) and not inspect.iscoroutinefunction(getattr(cls, method))
