"""When the learner's side of a process group begins and ends its broadcasts.

Here no process receives them; what real servers get is in `contract/test_weights.py`.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from agentrl.engines.transport import group as group_module
from agentrl.engines.transport.base import GroupAddress, WeightReceiver
from agentrl.engines.transport.buckets import Bucket, TensorSpec
from agentrl.engines.transport.group import GroupTransport, dist
from agentrl.engines.transport.shared_memory import SharedBuffer
from agentrl.errors import EngineError

COUNT = 4


class Group:
    """In the place of a process group."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def abort(self) -> None:
        self._events.append("abort")


class Broadcasts:
    """In the place of `dist.broadcast`: notes what begins and ends.

    With `overlap` one ends when the next has begun, if there is one, and the last takes a while.
    """

    def __init__(self, events: list[str], *, overlap: bool) -> None:
        self.events, self.overlap = events, overlap
        self.begun = [threading.Event() for _ in range(COUNT)]
        self.may_begin, self.may_end = threading.Event(), threading.Event()
        self.may_begin.set()
        self.may_end.set()

    def __call__(self, flat: torch.Tensor, *, group: Group, **_options: object) -> Broadcast:
        assert group is not None, "it would go to the learner's own group"
        self.may_begin.wait(10)
        index = int(flat[0])
        self.events.append(f"begin {index}")
        self.begun[index].set()
        return Broadcast(self, index)


class Broadcast:
    def __init__(self, all_of_them: Broadcasts, index: int) -> None:
        self._all, self._index = all_of_them, index

    def wait(self) -> None:
        self._all.may_end.wait(10)
        if self._all.overlap and self._index + 1 < COUNT:
            if not self._all.begun[self._index + 1].wait(10):
                raise RuntimeError(f"nothing began while {self._index} was under way")
        elif self._all.overlap:
            time.sleep(0.2)
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


def bucket(index: int, events: list[str]) -> Bucket:
    """One byte, which is its number."""
    return Bucket(
        (TensorSpec(f"weight {index}", "uint8", (1,)),),
        torch.tensor([index], dtype=torch.uint8),
        release=lambda: events.append(f"release {index}"),
    )


async def numbered(
    events: list[str], count: int = COUNT, error: Exception | None = None
) -> AsyncIterator[Bucket]:
    for index in range(count):
        yield bucket(index, events)
    if error is not None:
        raise error


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    events: list[str] = []
    monkeypatch.setattr(group_module, "new_group", lambda address, rank: Group(events))
    monkeypatch.setattr(dist, "destroy_process_group", lambda group: None)
    return events


async def used_once(
    receivers: Sequence[Receiver], events: list[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[GroupTransport, Broadcasts]:
    """A transport whose next transfer is announced, and what it will broadcast with."""
    transport = GroupTransport("gloo")
    monkeypatch.setattr(dist, "broadcast", Broadcasts(events, overlap=False))
    await transport.send(receivers, numbered(events), 1)
    assert events == [
        event for i in range(COUNT) for event in (f"begin {i}", f"end {i}", f"release {i}")
    ]
    events.clear()
    broadcasts = Broadcasts(events, overlap=True)
    monkeypatch.setattr(dist, "broadcast", broadcasts)
    return transport, broadcasts


async def test_a_bucket_that_is_announced_is_sent_while_the_one_before_is_under_way(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    receivers = [Receiver()]
    transport, _ = await used_once(receivers, events, monkeypatch)
    await transport.send(receivers, numbered(events), 2)
    order = events.index
    for i in range(COUNT):
        assert order(f"begin {i}") < order(f"end {i}") < order(f"release {i}")
    for i in range(COUNT - 1):
        assert order(f"begin {i + 1}") < order(f"end {i}")
    for i in range(COUNT - 2):
        assert order(f"release {i}") < order(f"begin {i + 2}")  # two have memory
    await transport.close()


@pytest.mark.parametrize("failure", ["the source", "one bucket more"])
async def test_the_group_goes_when_the_last_bucket_has_arrived_also_where_the_learner_fails(
    failure: str, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    receivers = [Receiver()]
    transport, _ = await used_once(receivers, events, monkeypatch)
    more = numbered(events, COUNT + 1)
    broken = numbered(events, error=EngineError("no longer those: the source"))
    with pytest.raises(EngineError, match="no longer those"):
        await transport.send(receivers, more if failure == "one bucket more" else broken, 2)
    assert events.index(f"end {COUNT - 1}") < events.index("abort")


async def test_a_group_lives_as_long_as_a_broadcast_is_waited_for(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo's joins threads when it goes: those that wait for a receiver that hangs."""

    class Refusing(Receiver):
        refuses = False

        async def receive_broadcasts(
            self, buckets: Sequence[Sequence[TensorSpec]], group: str
        ) -> None:
            if self.refuses:
                asyncio.get_running_loop().call_soon(begin)
                raise EngineError("refused")

    def begin() -> None:
        """That it has begun comes to the event loop when it cancels the update."""
        broadcasts.may_begin.set()
        assert broadcasts.begun[0].wait(10)
        time.sleep(0.1)

    receiver = Refusing()
    transport, broadcasts = await used_once([receiver], events, monkeypatch)
    group = weakref.ref(transport._group)
    broadcasts.may_begin.clear()
    broadcasts.may_end.clear()
    receiver.refuses = True
    with pytest.raises(EngineError, match="refused"):
        await transport.send([receiver], numbered(events), 2)
    assert "abort" in events
    gc.collect()
    assert group() is not None
    for event in (broadcasts.may_end, *broadcasts.begun):
        event.set()


async def test_a_bucket_that_comes_too_late_goes_to_no_other_group(
    events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    receivers = [Receiver()]
    transport, _ = await used_once(receivers, events, monkeypatch)

    class Late(torch.Tensor):
        def cpu(self) -> torch.Tensor:
            transport._tear_down()
            return torch.zeros(1, dtype=torch.uint8)

    async def late() -> AsyncIterator[Bucket]:
        one = bucket(0, events)
        yield Bucket(one.specs, one.flat.as_subclass(Late))

    with pytest.raises(EngineError, match="given up"):
        await transport.send(receivers, late(), 2)
    assert events == ["abort"]
