"""Weights in flat buckets, packed straight into the memory that a transport sends from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

__all__ = ["SLOTS", "Bucket", "Memory", "SlotMemory", "TensorSpec", "pack"]

SLOTS = 2
"""Buckets that exist at once: while one is sent the next is packed."""

BYTES_AT_ONCE = 256 << 20
"""A copy of several tensors begins when so much is at hand: merged weights are kept that long."""

Memory = Callable[[int, int, torch.device], Sequence[torch.Tensor]]
"""Called with a slot, a number of bytes and the device of the weights, gives the memory that a
bucket lies in: uint8, first on that device, then wherever else it shall be copied to. All of the
slot's memory may be written until the bucket is packed."""


def _nothing() -> None:
    """A bucket whose memory nobody waits for."""


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
    """Tensors of one dtype, one after the other, without gaps, in `flat` (uint8).

    It is valid until `release` is called, once, by whoever has done with it: then its slot is
    written again.
    """

    specs: tuple[TensorSpec, ...]
    flat: torch.Tensor
    slot: int = 0
    release: Callable[[], None] = field(default=_nothing, compare=False)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of the single tensors."""
        start = 0
        for spec in self.specs:
            part = self.flat[start : start + spec.nbytes]
            yield spec.name, part.view(getattr(torch, spec.dtype)).view(spec.shape)
            start += spec.nbytes


class SlotMemory:
    """Memory of this process alone, kept from bucket to bucket; a `Memory`."""

    def __init__(self) -> None:
        self._kept: dict[int, torch.Tensor] = {}

    def __call__(self, slot: int, nbytes: int, device: torch.device) -> Sequence[torch.Tensor]:
        """See `Memory`."""
        kept = self._kept.pop(slot, None)
        if kept is None or kept.numel() < nbytes or kept.device != device:
            del kept  # before the new one is taken
            kept = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._kept[slot] = kept
        return (kept,)


def pack(
    named_weights: Iterator[tuple[str, torch.Tensor]],
    capacity: int,
    memory: Memory,
    *,
    live: bool = False,
) -> Iterator[Bucket]:
    """Copy tensors into buckets of at most `capacity` bytes, which lie in the slots in turn.

    A slot is written only between the drawing of the bucket before and its own; a bucket that is
    drawn has been written, also where a GPU does it. A tensor that is larger than `capacity` has a
    bucket of its own size; a change of dtype begins a new bucket, so that every tensor is aligned.
    Iterate it under `torch.no_grad()`.

    Args:
        named_weights: names and tensors.
        capacity: bytes.
        memory: where buckets lie.
        live: tensors stay valid when others are drawn, so that many are copied in one call;
            otherwise each is copied before the next is drawn.
    """
    slots = itertools.cycle(range(SLOTS))
    filling: _Filling | None = None
    for name, tensor in named_weights:
        spec = TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if filling is not None and not filling.takes(spec):
            yield filling.finish()
            filling = None
        if filling is None:
            slot, limit = next(slots), max(capacity, spec.nbytes)
            filling = _Filling(slot, memory(slot, limit, tensor.device), limit)
        filling.add(spec, tensor, live=live)
        del tensor
    if filling is not None:
        yield filling.finish()


class _Filling:
    """The bucket that is being packed."""

    def __init__(self, slot: int, places: Sequence[torch.Tensor], limit: int) -> None:
        self._slot = slot
        self._flat, *self._elsewhere = places
        self._limit = limit
        self._specs: list[TensorSpec] = []
        self._filled = 0
        self._copied = 0
        self._sources: list[torch.Tensor] = []

    def takes(self, spec: TensorSpec) -> bool:
        """Whether a tensor fits behind those that are there."""
        return spec.dtype == self._specs[-1].dtype and self._filled + spec.nbytes <= self._limit

    def add(self, spec: TensorSpec, tensor: torch.Tensor, *, live: bool) -> None:
        """Copy a tensor behind those that are there, soon if it is `live`, else now."""
        self._specs.append(spec)
        self._sources.append(tensor)
        self._filled += spec.nbytes
        if not live or self._filled - self._copied >= BYTES_AT_ONCE:
            self._copy()

    def finish(self) -> Bucket:
        """The bucket, when all its copies have been carried out."""
        self._copy()
        places = [place[: self._filled] for place in (self._flat, *self._elsewhere)]
        for place in places[1:]:
            place.copy_(places[0], non_blocking=True)
        for place in places:
            if place.is_cuda:
                torch.cuda.current_stream(place.device).synchronize()
        return Bucket(tuple(self._specs), places[0], self._slot)

    def _copy(self) -> None:
        if self._sources:
            part = self._flat[self._copied : self._filled].view(self._sources[0].dtype)
            parts = part.split_with_sizes([source.numel() for source in self._sources])
            targets = [p.view(s.shape) for p, s in zip(parts, self._sources, strict=True)]
            torch._foreach_copy_(targets, self._sources)
        self._sources, self._copied = [], self._filled
