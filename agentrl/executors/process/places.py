"""Where an environment may live outside agentrl's process, and how one that hangs is given up."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Any

__all__ = ["EnvHost", "EnvPlace"]


class EnvPlace(ABC):
    """A process, here or elsewhere, that holds the instance of one episode."""

    @property
    @abstractmethod
    def has_ended(self) -> bool:
        """Whether the process is known to be gone."""

    @abstractmethod
    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the instance, after the calls before it. Cancelling this cancels the
        call there, if it is a coroutine's.

        Raises:
            AgentError: the process ended before it answered, or something cannot travel.
            Exception: whatever the method raised.
        """

    @abstractmethod
    def kill(self) -> None:
        """End the process, now."""


class EnvHost(ABC):
    """Makes places for the environments of one agent."""

    def __init__(self) -> None:
        self._retiring: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def fork(self) -> EnvPlace:
        """A new place, in which no instance is built yet.

        Raises:
            AgentError: there can be none.
        """

    def retire(self, place: EnvPlace, seconds: float) -> None:
        """Give up a place whose call did not return: `close` follows it if it returns within
        `seconds`, else the process is killed. Returns at once."""
        task = asyncio.create_task(_retire(place, seconds))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def close(self) -> None:
        """End all processes; nothing of them is left when this returns."""
        if self._retiring:
            await asyncio.wait(self._retiring)


async def _retire(place: EnvPlace, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await place.call("close")
    except Exception:  # noqa: BLE001 - the episode has failed already, for another reason
        pass
    finally:
        place.kill()
