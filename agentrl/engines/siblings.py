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
from types import TracebackType
from typing import Self

__all__ = ["Sibling", "Siblings"]

REMEMBERED = 65536
"""How many groups are remembered; the oldest are forgotten first."""


class Sibling:
    """One request, as a context: the `first` of its group is to have the prompt computed in it, and
    to say so. Where it does not, another will be the first."""

    def __init__(self, *, first: bool = False) -> None:
        self.first = first
        self.computed = False
        """Whether the prompt is in the cache."""
        self._over = asyncio.Event()

    async def wait(self) -> bool:
        """Wait until it is over; whether the prompt is computed."""
        await self._over.wait()
        return self.computed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()


class Siblings:
    """The groups of which a server has computed a prompt, or does so now.

    A group is known by any key that is another one when the cache has been emptied.
    """

    def __init__(self) -> None:
        self._firsts: OrderedDict[Hashable, Sibling] = OrderedDict()

    async def join(self, group: Hashable) -> Sibling:
        """Be the first of a group, or wait until its prompt is computed."""
        while (first := self._firsts.get(group)) is not None:
            if await first.wait():
                return Sibling()
            if self._firsts.get(group) is first:
                del self._firsts[group]
        self._firsts[group] = first = Sibling(first=True)
        if len(self._firsts) > REMEMBERED:
            self._firsts.popitem(last=False)
        return first
