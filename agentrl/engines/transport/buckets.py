"""Weights as a stream of flat buckets, gathered in a thread one bucket ahead of the transfer.

Drawing the weights is a collective of all learner ranks, so it always runs to its end, also when
the transfer has failed: ranks that are left waiting would hang. At most two buckets exist at once:
the one in transfer and the one being filled.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import torch

from agentrl.engines.base import WeightSource

__all__ = ["Bucket", "BucketStream", "TensorSpec", "pack"]

MAX_BUCKETS = 2


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype (`float32`, `bfloat16`, ...) and shape of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        itemsize: int = getattr(torch, self.dtype).itemsize
        return math.prod(self.shape) * itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors of one dtype, one after the other, without gaps, in `flat` (uint8)."""

    specs: tuple[TensorSpec, ...]
    flat: torch.Tensor

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of the single tensors."""
        start = 0
        for spec in self.specs:
            part = self.flat[start : start + spec.nbytes]
            yield spec.name, part.view(getattr(torch, spec.dtype)).view(spec.shape)
            start += spec.nbytes


def pack(named_weights: Iterator[tuple[str, torch.Tensor]], capacity: int) -> Iterator[Bucket]:
    """Copy tensors into buckets of at most `capacity` bytes.

    A tensor that is larger has a bucket of its own size; a change of dtype begins a new bucket, so
    that every tensor is aligned. Tensors are copied before the next is drawn, since a gathered one
    is valid only that long.
    """
    specs: list[TensorSpec] = []
    buffer: torch.Tensor | None = None
    filled = 0
    for name, tensor in named_weights:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        spec = TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        full = buffer is not None and filled + flat.numel() > buffer.numel()
        if buffer is not None and (full or specs[-1].dtype != spec.dtype):
            yield Bucket(tuple(specs), buffer[:filled])
            specs, buffer, filled = [], None, 0
        if buffer is None:
            buffer = flat.new_empty(max(capacity, flat.numel()))
        buffer[filled : filled + flat.numel()].copy_(flat)
        filled += flat.numel()
        specs.append(spec)
    if buffer is not None:
        yield Bucket(tuple(specs), buffer[:filled])


class BucketStream:
    """The buckets of one version, for one reader.

    Iterate it, then (always) `await finish()`: whatever was not read is drawn and thrown away.
    """

    def __init__(self, source: WeightSource, capacity: int) -> None:
        self._source = source
        self._capacity = capacity
        self._slots = threading.Semaphore(MAX_BUCKETS)
        self._discard = threading.Event()
        self._ready: asyncio.Queue[Bucket | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._producer = asyncio.create_task(asyncio.to_thread(self._produce))
        self._producer.add_done_callback(lambda _: self._ready.put_nowait(None))

    async def __aiter__(self) -> AsyncIterator[Bucket]:
        """Yield each bucket; it is valid until the next is asked for."""
        while (bucket := await self._ready.get()) is not None:
            yield bucket
            del bucket
            self._slots.release()
        await self._producer

    async def finish(self) -> None:
        """Draw the rest of the weights without keeping them, and wait for the thread.

        Raises what drawing them raised.
        """
        self._discard.set()
        self._slots.release()
        await self._producer

    def _produce(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)  # the current device belongs to a thread
        with torch.no_grad():
            weights = self._source.named_weights()
            buckets = pack(weights, self._capacity)
            while not self._discard.is_set():
                self._slots.acquire()
                if self._discard.is_set():
                    break
                bucket = next(buckets, None)
                if bucket is None:
                    return
                self._loop.call_soon_threadsafe(self._ready.put_nowait, bucket)
                del bucket
            for _ in weights:
                pass
