"""Several coroutines that succeed or fail as one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any

__all__ = ["together"]


async def together(coroutines: Iterable[Awaitable[Any]]) -> list[Any]:
    """Run together; the first failure cancels the others, waits for their end, and is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
