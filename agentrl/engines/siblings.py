"""Who has a shared prompt computed, and who waits for it.

The members of a group have one prompt and come together. SGLang finds in its cache what it has
computed, not what it is about to compute, so it computes the prompt for each of those that come
before the first is done. Here the first of a group has its prompt computed before it samples, and
the others are sent when that is done.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Hashable
from typing import TypeVar

__all__ = ["Sibling", "Siblings"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

REMEMBERED = 8192
"""How many groups, and how many of their members, are remembered; the oldest are forgotten first.
"""


class Sibling:
    """One request; the `first` of its group is to have the prompt computed, and then to `end`."""

    def __init__(self, *, first: bool = False) -> None:
        self.first = first
        self.settled = False
        """Whether nobody waits for the prompt any more: it is computed, or cannot be. Where the
        first ends without, another will be the first."""
        self._over = asyncio.Event()

    async def wait(self) -> bool:
        """Wait until it is over; whether the prompt is settled."""
        await self._over.wait()
        return self.settled

    def end(self) -> None:
        """Let the others look."""
        self._over.set()


class Siblings:
    """The groups of which a server has computed a prompt, or does so now."""

    def __init__(self) -> None:
        self._firsts: OrderedDict[Hashable, Sibling] = OrderedDict()
        self._begun: OrderedDict[str, None] = OrderedDict()

    def begins(self, rollout_id: str) -> bool:
        """Whether this is the first request of a member, whose later prompts are its own."""
        begun = rollout_id in self._begun
        if rollout_id:
            _remember(self._begun, rollout_id, None)
        return not begun

    async def join(self, group: Hashable) -> Sibling:
        """Be the first of a group, or wait until its prompt is settled.

        A group is known by any key that is another one for another cache.
        """
        while (first := self._firsts.get(group)) is not None:
            if await first.wait():
                return Sibling()
            if self._firsts.get(group) is first:
                del self._firsts[group]
        first = Sibling(first=True)
        _remember(self._firsts, group, first)
        return first

    def forget(self) -> None:
        """The cache is empty: prompts are to be computed anew."""
        self._firsts.clear()


def _remember(memory: OrderedDict[K, V], key: K, value: V) -> None:
    memory[key] = value
    if len(memory) > REMEMBERED:
        memory.popitem(last=False)
