"""A transfer that is checked: what arrived equals what a load from disk gives.

The same weights are written beside the transfer and loaded a second time out of the folder; the
engine's own checksums before and after must agree. They are taken of the tensors that the engine
computes with (fused, sharded), so that nothing about its layout need be known here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

from agentrl.engines.transport.base import WeightReceiver, WeightTransport
from agentrl.engines.transport.buckets import Bucket, Memory
from agentrl.engines.transport.disk import DiskTransport
from agentrl.errors import EngineError

__all__ = ["VerifiedTransport"]


class VerifiedTransport(WeightTransport):
    """Sends by `transport` and by `disk`, and compares. At least twice as slow as the first."""

    def __init__(self, transport: WeightTransport, disk: DiskTransport) -> None:
        self.name = f"{transport.name}, verified"
        self._transport = transport
        self._disk = disk

    def memory(self, receivers: Sequence[WeightReceiver]) -> Memory:
        """What `transport` sends from."""
        return self._transport.memory(receivers)

    async def send(
        self,
        receivers: Sequence[WeightReceiver],
        buckets: AsyncIterator[Bucket],
        version: int,
    ) -> None:
        """See `WeightTransport.send`.

        Raises:
            EngineError: also when the checksums differ; the tensors are named.
        """
        kept: list[Bucket] = []

        async def keeping() -> AsyncIterator[Bucket]:
            async for bucket in buckets:
                kept.append(Bucket(bucket.specs, bucket.flat.cpu().clone()))
                yield bucket

        async def again() -> AsyncIterator[Bucket]:
            for bucket in kept:
                yield bucket

        await self._transport.send(receivers, keeping(), version)
        arrived = await _checksums(receivers)
        await self._disk.send(receivers, again(), version)
        expected = await _checksums(receivers)
        for receiver, got, wanted in zip(receivers, arrived, expected, strict=True):
            wrong = sorted(k for k in got.keys() | wanted.keys() if got.get(k) != wanted.get(k))
            if wrong:
                raise EngineError(
                    f"{len(wrong)} tensors of {receiver.label} arrived wrong by "
                    f"{self._transport.name} ({', '.join(wrong[:5])}): use engine.transport disk"
                )

    async def close(self) -> None:
        """Close both ways."""
        await self._transport.close()
        await self._disk.close()


async def _checksums(receivers: Sequence[WeightReceiver]) -> list[Mapping[str, str]]:
    return list(await asyncio.gather(*(receiver.checksums() for receiver in receivers)))
