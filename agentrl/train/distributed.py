"""The ranks of a learner: rank 0 drives, the others do the same work beside it.

torchrun starts them; one process alone is a group of one. Work goes out and results come back over
a gloo group of its own, whose waits have no practical end: the other ranks wait there while rank 0
samples.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

__all__ = ["RankGroup", "is_main_process"]

CONTROL_TIMEOUT = timedelta(days=30)
"""How long a rank waits for rank 0 to have work."""
DATA_TIMEOUT = timedelta(hours=1)
"""How long a collective within one piece of work may take."""

T = TypeVar("T")


def is_main_process() -> bool:
    """True on rank 0, also before the ranks are connected."""
    return os.environ.get("RANK", "0") == "0"


class RankGroup:
    """All ranks of this run. Every method is a collective except the properties."""

    def __init__(self) -> None:
        """Connect to the other ranks as the environment variables of torchrun say.

        Without them this process is a group of one. NCCL carries tensors where there is a GPU,
        gloo elsewhere.
        """
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            self.device = torch.device("cuda", torch.cuda.current_device())
        else:
            self.device = torch.device("cpu")
        if not dist.is_initialized():
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            # Alone there is no port to open, and no variable that a child process would inherit.
            alone: dict[str, Any] = {"store": HashStore(), "rank": 0, "world_size": 1}
            dist.init_process_group(
                backend, timeout=DATA_TIMEOUT, **({} if "RANK" in os.environ else alone)
            )
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._control = dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)

    def scatter(self, parts: Sequence[T] | None = None) -> T:
        """Rank 0 gives one picklable object for each rank; every rank gets its own."""
        if self.world_size == 1:
            assert parts is not None
            return parts[0]
        received: list[Any] = [None]
        dist.scatter_object_list(
            received, None if parts is None else list(parts), src=0, group=self._control
        )
        part: T = received[0]
        return part

    def gather(self, part: T) -> list[T]:
        """Every rank gives an object; rank 0 gets all in the order of ranks, the others none."""
        if self.world_size == 1:
            return [part]
        gathered: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(part, gathered, dst=0, group=self._control)
        return gathered or []
