"""Weights through memory that learner and engines of one host share: CUDA IPC, or host memory.

Two fixed buffers take turns. A process opens each of them once; after that a bucket costs one copy
into the buffer and one out of it. The engines confirm a bucket before its buffer is filled again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import torch

from agentrl.engines.transport.base import WeightReceiver, WeightTransport
from agentrl.engines.transport.buckets import Bucket
from agentrl.engines.transport.shared_memory import SharedBuffer

__all__ = ["IPCTransport"]

BUFFERS = 2


class IPCTransport(WeightTransport):
    """Copies buckets through shared buffers of `bucket_bytes` each."""

    name = "ipc"

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._buffers: list[SharedBuffer] = []

    async def send(
        self,
        receivers: Sequence[WeightReceiver],
        buckets: AsyncIterator[Bucket],
        version: int,
    ) -> None:
        """See `WeightTransport.send`."""
        await asyncio.gather(*(receiver.begin_update() for receiver in receivers))
        turn = 0
        async for bucket in buckets:
            buffer = self._buffer(turn, bucket.flat)
            turn = (turn + 1) % BUFFERS
            buffer.flat[: bucket.flat.numel()].copy_(bucket.flat)
            if buffer.flat.is_cuda:
                await asyncio.to_thread(torch.cuda.synchronize, buffer.flat.device)
            await asyncio.gather(*(r.receive_shared(bucket.specs, buffer) for r in receivers))
        await asyncio.gather(*(receiver.end_update() for receiver in receivers))

    async def close(self) -> None:
        """Give the buffers back."""
        self._buffers.clear()

    def _buffer(self, turn: int, flat: torch.Tensor) -> SharedBuffer:
        """The buffer whose turn it is, made anew for a bucket that it cannot hold."""
        while len(self._buffers) <= turn:
            self._buffers.append(SharedBuffer.allocate(self._bucket_bytes, flat.device))
        if self._buffers[turn].flat.numel() < flat.numel():
            self._buffers[turn] = SharedBuffer.allocate(flat.numel(), flat.device)
        return self._buffers[turn]
