"""What runs in the process of one environment: it builds the instance, and answers its calls.

Where any method is `async def`, they run on an event loop, which goes on between calls; otherwise
there is no loop, and every call is a plain one in the main thread.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

from agentrl.executors.base import AgentInstance
from agentrl.executors.process.frames import CANCEL, Outcome, receive

__all__ = ["METHODS", "call_on_loop", "call_without_loop", "serve"]

METHODS = ("__init__", "reset", "step", "close")


def serve(connection: socket.socket, instance_class: type[AgentInstance]) -> None:
    """Answer calls until there are no more."""
    _reseed()
    instance = instance_class.__new__(instance_class)
    if any(inspect.iscoroutinefunction(getattr(instance_class, name)) for name in METHODS):
        asyncio.run(_serve_on_loop(connection, instance))
        return
    while (frame := receive(connection)) is not None:
        if frame != CANCEL:  # the call that was meant has returned by now
            connection.sendall(call_without_loop(instance, *frame).to_bytes())


async def _serve_on_loop(connection: socket.socket, instance: AgentInstance) -> None:
    current: asyncio.Task[None] | None = None
    while (frame := await asyncio.to_thread(receive, connection)) is not None:
        if frame == CANCEL:
            if current is not None:
                current.cancel()
            continue
        if current is not None:
            await asyncio.wait({current})
        current = asyncio.create_task(_answer_on_loop(connection, instance, *frame))


async def _answer_on_loop(
    connection: socket.socket, instance: AgentInstance, method: str, arguments: tuple[Any, ...]
) -> None:
    connection.sendall((await call_on_loop(instance, method, arguments)).to_bytes())


def _call(instance: AgentInstance, method: str, arguments: tuple[Any, ...]) -> Outcome:
    """Call a method; what came of it."""
    function: Callable[..., Any] = getattr(instance, method)
    try:
        return Outcome(function(*arguments))
    except BaseException as error:  # noqa: BLE001 - raised where the call came from
        return Outcome.failed(error)


def call_without_loop(instance: AgentInstance, method: str, arguments: tuple[Any, ...]) -> Outcome:
    """Call a method where no event loop runs; a coroutine that it returns gets one for itself."""
    outcome = _call(instance, method, arguments)
    return asyncio.run(_awaited(outcome)) if inspect.isawaitable(outcome.value) else outcome


async def call_on_loop(instance: AgentInstance, method: str, arguments: tuple[Any, ...]) -> Outcome:
    """Call a method, and await what it returns if that can be awaited."""
    outcome = _call(instance, method, arguments)
    return await _awaited(outcome) if inspect.isawaitable(outcome.value) else outcome


async def _awaited(outcome: Outcome) -> Outcome:
    try:
        return Outcome(await outcome.value)
    except BaseException as error:  # noqa: BLE001 - raised where the call came from
        return Outcome.failed(error)


def _reseed() -> None:
    """Libraries whose random state was copied with the process; Python's own has been seen to."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(int.from_bytes(os.urandom(8), "big"))
