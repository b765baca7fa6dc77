"""What a weight transport is, and what it asks of an engine.

A transport moves the buckets of one version into a set of receivers. It knows nothing of pausing,
caches, versions and time limits: `agentrl.engines.weight_update` keeps the order and cancels what
takes too long. A transfer that fails or is cancelled leaves the transport able to try again; what
the receivers hold then is not defined.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from agentrl.engines.transport.buckets import Bucket, Memory, SlotMemory, TensorSpec
from agentrl.engines.transport.shared_memory import SharedBuffer
from agentrl.errors import EngineError

__all__ = ["GroupAddress", "WeightReceiver", "WeightTransport"]


@dataclass(frozen=True, slots=True)
class GroupAddress:
    """Where the process group of a transfer meets. The learner is rank 0."""

    name: str
    backend: str
    host: str
    port: int
    world_size: int
    timeout: float
    """Seconds that one collective may take."""


class WeightReceiver(ABC):
    """An engine as a transport sees it. Every method raises EngineError when it fails."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Names the engine in messages."""

    @property
    @abstractmethod
    def num_weight_ranks(self) -> int:
        """Processes of the engine that hold weights and join a process group."""

    @property
    @abstractmethod
    def incarnation(self) -> int:
        """A number that changes when the engine is started again and has forgotten everything."""

    @property
    def memory_device(self) -> torch.device | None:
        """The GPU whose memory the engine can open, as this process numbers it; None: any."""
        return None

    @abstractmethod
    async def load_folder(self, folder: Path) -> None:
        """Load safetensors from a folder that the server can read."""

    async def load_adapter(self, folder: Path) -> None:
        """Load a LoRA adapter beside the base weights and sample with it from now on."""
        raise EngineError(f"{self.label} takes no LoRA adapters: set engine.lora merged")

    @abstractmethod
    async def begin_update(self, calls: int | None = None) -> None:
        """Open an update; one left open by a failed transfer is closed first.

        Args:
            calls: how many calls of `receive_broadcasts` or `receive_shared` will bring all of it,
                if that is known: then the first of them may open the update, and the last close it,
                which saves a request each.
        """

    @abstractmethod
    async def end_update(self) -> None:
        """Close the update: the engine finishes what it does after loading."""

    @abstractmethod
    async def join_group(self, group: GroupAddress, rank_offset: int) -> None:
        """Join a process group with ranks `rank_offset .. rank_offset + num_weight_ranks`."""

    @abstractmethod
    async def leave_group(self, name: str) -> None:
        """Leave a process group."""

    @abstractmethod
    async def receive_broadcasts(self, buckets: Sequence[Sequence[TensorSpec]], group: str) -> None:
        """Take part in the broadcast of each bucket, one after the other, and load them."""

    @abstractmethod
    async def receive_shared(self, specs: Sequence[TensorSpec], buffer: SharedBuffer) -> None:
        """Load a bucket out of memory that this host shares."""

    @abstractmethod
    async def checksums(self) -> Mapping[str, str]:
        """Checksums of the weights as the engine holds them, by the engine's own names."""


class WeightTransport(ABC):
    """One way of moving weights."""

    name: str

    def memory(self, receivers: Sequence[WeightReceiver]) -> Memory:
        """Where the buckets of the next `send` to `receivers` lie."""
        return SlotMemory()

    @abstractmethod
    async def send(
        self,
        receivers: Sequence[WeightReceiver],
        buckets: AsyncIterator[Bucket],
        version: int,
    ) -> None:
        """Bring every bucket into every receiver, and release it when it is no longer read.

        Args:
            receivers: those that `memory` was asked for.
            buckets: packed into what `memory` gave.
            version: of the weights.

        Raises:
            EngineError: a receiver failed.
        """

    async def close(self) -> None:
        """Free what the transport holds. Safe to call twice."""
