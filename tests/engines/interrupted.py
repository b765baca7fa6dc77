"""A transfer in the middle of which something happens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from agentrl.engines.transport.base import WeightReceiver, WeightTransport
from agentrl.engines.transport.buckets import Bucket, Memory


class AfterOneBucket(WeightTransport):
    """Hands on one bucket, then does something else before the next."""

    name = "interrupted"

    def __init__(
        self, transport: WeightTransport, interruption: Callable[[], Awaitable[None]]
    ) -> None:
        self.inner, self.interruption = transport, interruption

    def memory(self, receivers: Sequence[WeightReceiver]) -> Memory:
        return self.inner.memory(receivers)

    async def send(
        self, receivers: Sequence[WeightReceiver], buckets: AsyncIterator[Bucket], version: int
    ) -> None:
        async def interrupted() -> AsyncIterator[Bucket]:
            yield await anext(buckets)
            await self.interruption()
            async for bucket in buckets:
                yield bucket

        await self.inner.send(receivers, interrupted(), version)

    async def close(self) -> None:
        await self.inner.close()
