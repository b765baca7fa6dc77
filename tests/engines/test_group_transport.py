"""When the learner's side of a process group begins and ends its broadcasts.

Here no process receives them; what real servers get is in `contract/test_weights.py`.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from agentrl.engines.transport.base import GroupAddress, WeightReceiver
from agentrl.engines.transport.buckets import Bucket, TensorSpec
from agentrl.engines.transport.group import GroupTransport, dist
from agentrl.engines.transport.shared_memory import SharedBuffer

COUNT = 4


class Broadcasts:
    """In the place of `dist.broadcast`: notes what begins and ends.

    With `overlap` one ends when the next has begun, if there is one.
    """

    def __init__(self, *, overlap: bool) -> None:
        self.events: list[str] = []
        self.overlap = overlap
        self.begun = [threading.Event() for _ in range(COUNT)]

    def __call__(self, flat: torch.Tensor, **_options: object) -> Broadcast:
        index = int(flat[0])
        self.events.append(f"begin {index}")
        self.begun[index].set()
        return Broadcast(self, index)


class Broadcast:
    def __init__(self, all_of_them: Broadcasts, index: int) -> None:
        self._all, self._index = all_of_them, index

    def wait(self) -> None:
        following = self._all.begun[self._index + 1 :][:1] if self._all.overlap else []
        if not all(event.wait(10) for event in following):
            raise RuntimeError(f"nothing began while {self._index} was under way")
        self._all.events.append(f"end {self._index}")


class Receiver(WeightReceiver):
    """Joins a group, and takes whatever comes."""

    label = "receiver"
    num_weight_ranks = 1
    incarnation = 0

    async def begin_update(self, calls: int | None = None) -> None: ...
    async def end_update(self) -> None: ...
    async def join_group(self, group: GroupAddress, rank_offset: int) -> None: ...
    async def leave_group(self, name: str) -> None: ...
    async def receive_broadcasts(
        self, buckets: Sequence[Sequence[TensorSpec]], group: str
    ) -> None: ...

    async def load_folder(self, folder: Path) -> None:
        raise AssertionError("not called")

    async def receive_shared(self, specs: Sequence[TensorSpec], buffer: SharedBuffer) -> None:
        raise AssertionError("not called")

    async def checksums(self) -> Mapping[str, str]:
        raise AssertionError("not called")


async def numbered(events: list[str]) -> AsyncIterator[Bucket]:
    """Buckets of one byte, which is their number."""
    for index in range(COUNT):
        yield Bucket(
            (TensorSpec(f"weight {index}", "uint8", (1,)),),
            torch.tensor([index], dtype=torch.uint8),
            release=lambda index=index: events.append(f"release {index}"),
        )


async def test_a_bucket_that_is_announced_is_sent_while_the_one_before_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentrl.engines.transport.group.new_group", lambda address, rank: _Group())
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: None)
    transport, receivers = GroupTransport("gloo"), [Receiver()]
    first, second = Broadcasts(overlap=False), Broadcasts(overlap=True)
    monkeypatch.setattr(dist, "broadcast", first)
    await transport.send(receivers, numbered(first.events), 1)
    assert first.events == [
        event for i in range(COUNT) for event in (f"begin {i}", f"end {i}", f"release {i}")
    ]
    monkeypatch.setattr(dist, "broadcast", second)
    await transport.send(receivers, numbered(second.events), 2)
    order = second.events.index
    for i in range(COUNT):
        assert order(f"begin {i}") < order(f"end {i}") < order(f"release {i}")
    for i in range(COUNT - 1):
        assert order(f"begin {i + 1}") < order(f"end {i}")
    for i in range(COUNT - 2):
        assert order(f"release {i}") < order(f"begin {i + 2}")  # two have memory
    await transport.close()


class _Group:
    def abort(self) -> None: ...
