"""Moves what tensors hold to host memory and back, so that others can have the device meanwhile.

The storage is emptied and filled again, not replaced: every tensor, view and reference stays the
same object, so that whoever owns them (DeepSpeed, the optimizer) need not know. DeepSpeed's own
`offload_states` takes no optimizer but its FusedAdam.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage

__all__ = ["HostCopy"]


class HostCopy:
    """The contents of tensors, while they are in host memory."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Copy the whole storage of each tensor and give its device memory back.

        Until `restore` nobody may read or write the tensors, or views of them.
        """
        storages = {s.data_ptr(): s for s in (t.untyped_storage() for t in tensors) if s.nbytes()}
        self._held = [(storage, _on_host(storage)) for storage in storages.values()]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for storage in storages.values():
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @property
    def nbytes(self) -> int:
        """Size of what is held."""
        return sum(copy.numel() for _, copy in self._held)

    def restore(self) -> None:
        """Take the device memory again and fill it. Call it once."""
        for storage, copy in self._held:
            storage.resize_(copy.numel())
            _bytes_of(storage).copy_(copy, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._held = []


def _on_host(storage: UntypedStorage) -> Tensor:
    pinned = storage.device.type == "cuda"
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
    return copy.copy_(_bytes_of(storage), non_blocking=pinned)


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
