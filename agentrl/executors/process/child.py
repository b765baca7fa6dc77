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

from agentrl.errors import AgentError
from agentrl.executors.base import AgentInstance
from agentrl.executors.process.frames import CANCEL, Outcome, receive, send

__all__ = ["serve"]

_METHODS = ("__init__", "reset", "step", "close")


def serve(connection: socket.socket, instance_class: type[AgentInstance]) -> None:
    """Answer calls until there are no more."""
    _reseed()
    instance = instance_class.__new__(instance_class)
    if any(inspect.iscoroutinefunction(getattr(instance_class, name)) for name in _METHODS):
        asyncio.run(_serve_on_loop(connection, instance))
        return
    while (call := receive(connection)) is not None:
        if call != CANCEL:  # the call that was meant has returned by now
            _answer(connection, _call(instance, *call))


async def _serve_on_loop(connection: socket.socket, instance: AgentInstance) -> None:
    current: asyncio.Task[None] | None = None
    while (call := await asyncio.to_thread(receive, connection)) is not None:
        if call == CANCEL:
            if current is not None:
                current.cancel()
            continue
        if current is not None:
            await asyncio.wait({current})
        current = asyncio.create_task(_answer_on_loop(connection, instance, call))


async def _answer_on_loop(
    connection: socket.socket, instance: AgentInstance, call: tuple[str, tuple[Any, ...]]
) -> None:
    outcome = _call(instance, *call)
    if inspect.isawaitable(outcome.value):
        try:
            outcome = Outcome(await outcome.value)
        except BaseException as error:  # noqa: BLE001 - raised where the call came from
            outcome = Outcome.failed(error)
    _answer(connection, outcome)


def _call(instance: AgentInstance, method: str, arguments: tuple[Any, ...]) -> Outcome:
    function: Callable[..., Any] = getattr(instance, method)
    try:
        return Outcome(function(*arguments))
    except BaseException as error:  # noqa: BLE001 - raised where the call came from
        return Outcome.failed(error)


def _answer(connection: socket.socket, outcome: Outcome) -> None:
    try:
        send(connection, outcome)
    except AgentError as error:
        send(connection, Outcome.failed(error))


def _reseed() -> None:
    """Libraries whose random state was copied with the process; Python's own has been seen to."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(int.from_bytes(os.urandom(8), "big"))
