"""The buckets of one version, packed in a thread while those before are sent.

Drawing the weights is a collective of all learner ranks, so it always runs to its end, also when
the transfer or the packing has failed: ranks that are left waiting would hang. A slot's memory is
written again only when the bucket that lay in it was released: a bucket that is given up in a
failed transfer is never overwritten.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import torch

from agentrl.engines.base import WeightSource
from agentrl.engines.transport.buckets import SLOTS, Bucket, Memory, pack

__all__ = ["BucketStream"]


class BucketStream:
    """The buckets of one version, for one reader, who releases each.

    Iterate it, then (always) `await finish()`: whatever was not read is drawn and thrown away.

    Args:
        source: draws the weights.
        capacity: bytes of a bucket, see `pack`.
        memory: where buckets lie; called in the thread.
    """

    def __init__(self, source: WeightSource, capacity: int, memory: Memory) -> None:
        self._source = source
        self._capacity = capacity
        self._memory = memory
        self._free = [threading.Semaphore(1) for _ in range(SLOTS)]
        self._discard = threading.Event()
        self._ready: asyncio.Queue[Bucket | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._producer = asyncio.create_task(asyncio.to_thread(self._produce))
        self._producer.add_done_callback(lambda _: self._ready.put_nowait(None))

    async def __aiter__(self) -> AsyncIterator[Bucket]:
        """Yield each bucket, at most `SLOTS` that are not released."""
        while (bucket := await self._ready.get()) is not None:
            yield bucket
            del bucket
        await self._producer

    async def finish(self) -> None:
        """Draw the rest of the weights without keeping them, and wait for the thread.

        Raises what drawing them raised.
        """
        self._discard.set()
        for slot in self._free:
            slot.release()  # whoever waits for it sees that the rest is thrown away
        await self._producer

    def _produce(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)  # the current device belongs to a thread
        with torch.no_grad():
            weights = self._source.named_weights()
            try:
                self._pack(weights)
            finally:
                for _ in weights:
                    pass

    def _pack(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Pack until all is packed, or what is left is to be thrown away."""
        buckets = pack(weights, self._capacity, self._memory, live=self._source.live)
        for slot in itertools.cycle(self._free):
            slot.acquire()
            if self._discard.is_set():
                return
            bucket = next(buckets, None)
            if bucket is None:
                return
            bucket = replace(bucket, release=self._free[bucket.slot].release)
            self._loop.call_soon_threadsafe(self._ready.put_nowait, bucket)
            del bucket
