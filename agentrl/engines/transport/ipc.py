"""Weights through memory that learner and engines of one host share: CUDA IPC, or host memory.

Weights are packed straight into shared buffers, two on each GPU that an engine computes on, since
an engine sees no other GPU than its own. An engine opens each of them once; after that a bucket
costs one copy into its buffer, one more for each GPU that is not the learner's, and one out of it.

An engine is told of a bucket as soon as that is packed, while it still loads the one before, so
that it never waits for a request; in which order it takes the two does not matter. A buffer is
written again when every engine has confirmed the bucket that lay in it. After a failure an engine
may still read: then the buffers are left as they are, and the next transfer takes new ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import torch

from agentrl.engines.transport.base import WeightReceiver, WeightTransport
from agentrl.engines.transport.buckets import Bucket, Memory, SlotMemory
from agentrl.engines.transport.shared_memory import SharedBuffer
from agentrl.engines.transport.together import together
from agentrl.errors import EngineError

__all__ = ["IPCTransport"]


class IPCTransport(WeightTransport):
    """Has engines read buckets where the learner packs them."""

    name = "ipc"

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, int], SharedBuffer] = {}
        self._count: int | None = None
        """How many buckets the last transfer had, unless it failed."""

    def memory(self, receivers: Sequence[WeightReceiver]) -> Memory:
        """Shared buffers, which last for all transfers; memory of its own for packing if no engine
        reads on the device of the weights."""
        own = SlotMemory()

        def take(slot: int, nbytes: int, device: torch.device) -> Sequence[torch.Tensor]:
            devices = {_device(receiver, device) for receiver in receivers}
            shared = {d: self._buffer(slot, nbytes, d).flat for d in devices}
            home = [shared.pop(device)] if device in shared else own(slot, nbytes, device)
            return [*home, *shared.values()]

        return take

    async def send(
        self,
        receivers: Sequence[WeightReceiver],
        buckets: AsyncIterator[Bucket],
        version: int,
    ) -> None:
        """See `WeightTransport.send`."""
        expected, self._count = self._count, None
        try:
            await together(receiver.begin_update(expected) for receiver in receivers)
            count = 0
            async with asyncio.TaskGroup() as loading:
                async for bucket in buckets:
                    if count == expected:
                        raise _other_buckets("more", expected)
                    loading.create_task(self._load(receivers, bucket))
                    count += 1
            if expected is not None and count < expected:
                raise _other_buckets("less", expected)
            await together(receiver.end_update() for receiver in receivers)
            self._count = count or None
        except BaseException as error:
            self._buffers.clear()
            if not isinstance(error, BaseExceptionGroup):
                raise
            first = error.exceptions[0]
            raise first from first.__cause__

    async def close(self) -> None:
        """Give the buffers back."""
        self._buffers.clear()

    async def _load(self, receivers: Sequence[WeightReceiver], bucket: Bucket) -> None:
        """Have every engine load a bucket, then let its buffers be written again."""
        home = bucket.flat.device
        await together(
            receiver.receive_shared(
                bucket.specs, self._buffers[_device(receiver, home), bucket.slot]
            )
            for receiver in receivers
        )
        bucket.release()

    def _buffer(self, slot: int, nbytes: int, device: torch.device) -> SharedBuffer:
        """The buffer of a slot on a device, made anew where it cannot hold `nbytes`."""
        buffer = self._buffers.get((device, slot))
        if buffer is None or buffer.flat.numel() < nbytes:
            del buffer
            self._buffers.pop((device, slot), None)  # before the new one is taken
            buffer = self._buffers[device, slot] = SharedBuffer.allocate(nbytes, device)
        return buffer


def _other_buckets(how_many: str, expected: int) -> EngineError:
    return EngineError(
        f"the weights come in {how_many} buckets than the {expected} of the last update: update "
        "again, which opens and closes it by requests of their own"
    )


def _device(receiver: WeightReceiver, home: torch.device) -> torch.device:
    """Where an engine reads weights that are on `home`."""
    return receiver.memory_device or home
