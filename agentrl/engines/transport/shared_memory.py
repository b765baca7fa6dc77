"""Memory that other processes of this host can open: CUDA IPC handles, or named host memory."""

from __future__ import annotations

import base64
import io
import pickle
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.multiprocessing import reductions

__all__ = ["SharedBuffer", "share", "share_parts"]

_naming = threading.Lock()
"""The way of sharing belongs to the process, buffers are taken and named in several threads."""


@dataclass(frozen=True, slots=True)
class SharedBuffer:
    """Bytes that other processes of this host can open.

    `name` is unique; `flat` is uint8. The memory lives as long as this process holds `flat`.
    """

    name: str
    flat: torch.Tensor

    @classmethod
    def allocate(cls, nbytes: int, device: torch.device) -> SharedBuffer:
        """Take memory on `device`. Any thread may call it."""
        if device.type == "cpu":
            with _named_files():  # takes no page of it before that is written
                storage = torch.UntypedStorage._new_shared(nbytes)  # type: ignore[no-untyped-call]
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
        else:
            flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return cls(uuid.uuid4().hex, flat)


@contextmanager
def _named_files() -> Iterator[None]:
    """Share host memory by file names: the other way, a descriptor cannot travel over HTTP."""
    with _naming:
        strategy = mp.get_sharing_strategy()  # type: ignore[no-untyped-call]
        mp.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            mp.set_sharing_strategy(strategy)  # type: ignore[no-untyped-call]


def share(value: Any) -> str:
    """Pickle `value` in base64, its tensors as handles of shared memory.

    A GPU is named by its uuid, since processes may number devices differently.
    """
    stream = io.BytesIO()
    pickler = ForkingPickler(stream, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table[torch.Tensor] = _reduce_tensor
    with _named_files():
        pickler.dump(value)
    return base64.b64encode(stream.getvalue()).decode()


def share_parts(tensor: torch.Tensor) -> str:
    """Pickle in base64 the function and the arguments that open `tensor` in another process."""
    with _named_files():
        parts = _reduce_tensor(tensor)
        return base64.b64encode(bytes(ForkingPickler.dumps(parts))).decode()


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    rebuild, arguments = reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    if tensor.is_cuda:
        uuid_of_device = str(torch.cuda.get_device_properties(tensor.device).uuid)
        arguments = (*arguments[:6], uuid_of_device, *arguments[7:])
    return rebuild, arguments
