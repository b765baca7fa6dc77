"""Watches what a user's environments do, from inside the real stack.

While `Observer.watching` is open, `reset`, `step` and `close` of the given classes are recorded on
their way: nothing about them changes but that somebody looks.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from agentrl.executors.base import AgentInstance

__all__ = ["Call", "Observer"]

METHODS = ("reset", "step", "close")


@dataclass(slots=True)
class Call:
    """One call of a user's method; `ended` None while it has not returned. Times in seconds."""

    instance: int
    method: str
    is_async: bool
    started: float
    ended: float | None = None
    returned: object = None
    raised: bool = False
    cancelled: bool = False


class Observer:
    """Records calls, and how often each instance was closed."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        # Kept, so that no later instance gets the id of an earlier one.
        self._instances: dict[int, AgentInstance] = {}

    @contextmanager
    def watching(self, classes: Iterable[type[AgentInstance]]) -> Iterator[None]:
        """Record the calls of all instances of `classes`."""
        replaced = []
        try:
            for cls in classes:
                for name in METHODS:
                    if getattr(cls, name) is getattr(AgentInstance, name):
                        # Not written by the user: agentrl leaves it out, and so does the check.
                        continue
                    own = vars(cls).get(name)
                    setattr(cls, name, self._recorded(name, getattr(cls, name)))
                    replaced.append((cls, name, own))
            yield
        finally:
            for cls, name, own in replaced:
                if own is None:
                    delattr(cls, name)
                else:
                    setattr(cls, name, own)

    def of(self, method: str) -> list[Call]:
        """The calls of one method."""
        return [call for call in self.calls if call.method == method]

    def closes(self) -> list[int]:
        """How often each instance was closed whose class has a `close` of its own."""
        counts = Counter(call.instance for call in self.of("close"))
        return [
            counts[number]
            for number, instance in enumerate(self._instances.values())
            if type(instance).close is not AgentInstance.close
        ]

    def _begin(self, instance: AgentInstance, method: str, is_async: bool) -> Call:
        self._instances.setdefault(id(instance), instance)
        number = list(self._instances).index(id(instance))
        call = Call(number, method, is_async, time.perf_counter())
        self.calls.append(call)
        return call

    def _recorded(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.iscoroutinefunction(method):

            @functools.wraps(method)
            async def observed_async(instance: AgentInstance, *args: Any, **kwargs: Any) -> Any:
                with _timed(self._begin(instance, name, True)) as call:
                    call.returned = await method(instance, *args, **kwargs)
                    return call.returned

            return observed_async

        @functools.wraps(method)
        def observed(instance: AgentInstance, *args: Any, **kwargs: Any) -> Any:
            with _timed(self._begin(instance, name, False)) as call:
                call.returned = method(instance, *args, **kwargs)
                return call.returned

        return observed


@contextmanager
def _timed(call: Call) -> Iterator[Call]:
    call.raised = True
    try:
        yield call
        call.raised = False
    except asyncio.CancelledError:
        call.cancelled = True
        raise
    finally:
        call.ended = time.perf_counter()
