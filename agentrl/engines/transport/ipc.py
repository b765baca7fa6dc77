"""Weights through memory that learner and engines of one host share: CUDA IPC, or host memory.

Two fixed buffers take turns on each GPU that an engine computes on, since an engine sees no other
GPU than its own. A process opens each of them once; after that a bucket costs one copy into each
buffer and one out of it. The engines confirm a bucket before its buffers are filled again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

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
        self._buffers: dict[tuple[torch.device, int], SharedBuffer] = {}

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
            home = bucket.flat.device
            devices = {receiver: receiver.memory_device or home for receiver in receivers}
            filled = await self._fill(turn, set(devices.values()), bucket.flat)
            turn = (turn + 1) % BUFFERS
            await asyncio.gather(
                *(
                    receiver.receive_shared(bucket.specs, filled[device])
                    for receiver, device in devices.items()
                )
            )
        await asyncio.gather(*(receiver.end_update() for receiver in receivers))

    async def close(self) -> None:
        """Give the buffers back."""
        self._buffers.clear()

    async def _fill(
        self, turn: int, devices: set[torch.device], flat: torch.Tensor
    ) -> Mapping[torch.device, SharedBuffer]:
        """Copy `flat` into the buffer of each device whose turn it is."""
        filled = {device: self._buffer(turn, device, flat.numel()) for device in devices}
        for buffer in filled.values():
            buffer.flat[: flat.numel()].copy_(flat, non_blocking=flat.is_cuda)
        for buffer in filled.values():
            if buffer.flat.is_cuda:
                await asyncio.to_thread(torch.cuda.synchronize, buffer.flat.device)
        return filled

    def _buffer(self, turn: int, device: torch.device, nbytes: int) -> SharedBuffer:
        """The buffer of a device whose turn it is, made anew where it cannot hold `nbytes`."""
        buffer = self._buffers.get((device, turn))
        if buffer is None or buffer.flat.numel() < nbytes:
            buffer = SharedBuffer.allocate(max(nbytes, self._bucket_bytes), device)
            self._buffers[device, turn] = buffer
        return buffer
