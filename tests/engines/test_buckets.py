"""Weights in buckets: every byte once, few bytes at a time, and the source always to its end."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator

import pytest
import torch

from agentrl.engines.base import WeightSource
from agentrl.engines.transport.buckets import Bucket, SlotMemory, pack
from agentrl.engines.transport.stream import BucketStream

CPU = torch.device("cpu")


def fresh(slot: int, nbytes: int, device: torch.device) -> list[torch.Tensor]:
    """Memory that is never written twice."""
    return [torch.empty(nbytes, dtype=torch.uint8, device=device)]


def source_of_ten(drawn: list[str], *, live: bool = False) -> WeightSource:
    """Ten tensors; says which were drawn."""

    def named_weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights(10):
            drawn.append(name)
            yield name, tensor

    return WeightSource(named_weights, 1, live=live)


def weights(count: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(f"layer.{i}", torch.randn(3, i + 1, generator=generator)) for i in range(count)]


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("capacity", [1, 100, 1000, 1 << 20])
def test_every_tensor_comes_out_as_it_went_in(capacity: int, live: bool) -> None:
    given = [*weights(20), ("scalar", torch.tensor(2.0)), ("columns", torch.randn(5, 4).T)]
    buckets = pack(iter(given), capacity, fresh, live=live)
    found = [pair for bucket in buckets for pair in bucket.tensors()]
    assert [name for name, _ in found] == [name for name, _ in given]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(given, found, strict=True))


def test_a_bucket_is_no_larger_than_its_capacity_unless_one_tensor_is() -> None:
    buckets = list(pack(iter(weights(20)), 200, fresh))
    assert all(b.flat.numel() <= 200 or len(b.specs) == 1 for b in buckets)
    assert 1 < len(buckets) < 20


def test_dtypes_are_not_mixed_and_survive() -> None:
    given = [("a", torch.ones(3, dtype=torch.bfloat16)), ("b", torch.ones(2)), ("c", torch.ones(2))]
    buckets = list(pack(iter(given), 1 << 20, fresh))
    assert [[spec.dtype for spec in b.specs] for b in buckets] == [["bfloat16"], ["float32"] * 2]


def test_a_tensor_may_change_as_soon_as_the_next_is_drawn() -> None:
    # trl#6765: a gathered tensor is a view that does not outlive its turn.
    def drawn() -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(4)
        for i in range(3):
            buffer.fill_(i)
            yield f"layer.{i}", buffer
        buffer.fill_(-1)

    found = dict(pair for bucket in pack(drawn(), 1 << 20, fresh) for pair in bucket.tensors())
    assert [int(found[f"layer.{i}"][0]) for i in range(3)] == [0, 1, 2]


def test_merged_tensors_are_kept_for_a_part_of_a_bucket_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agentrl.engines.transport.buckets.BYTES_AT_ONCE", 8)
    living: set[int] = set()
    most = 0

    def merged() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for i in range(10):
            tensor = torch.full((1,), float(i))
            living.add(i)
            weakref.finalize(tensor, living.discard, i)
            most = max(most, len(living))
            yield f"layer.{i}", tensor
            del tensor

    found = dict(
        pair for bucket in pack(merged(), 100, fresh, live=True) for pair in bucket.tensors()
    )
    assert [found[f"layer.{i}"].item() for i in range(10)] == list(range(10))
    assert most == 2


def test_a_bucket_lies_in_the_memory_it_is_given_and_is_copied_to_the_others() -> None:
    places = [[torch.zeros(64, dtype=torch.uint8) for _ in range(3)] for _ in range(2)]

    def memory(slot: int, nbytes: int, device: torch.device) -> list[torch.Tensor]:
        assert (nbytes, device) == (8, CPU)
        return places[slot]

    given = [(f"layer.{i}", torch.tensor([float(i)])) for i in range(4)]
    for number, bucket in enumerate(pack(iter(given), 8, memory)):
        assert bucket.slot == number
        assert bucket.flat.data_ptr() == places[number][0].data_ptr()
        for place in places[number]:
            assert place[:8].view(torch.float32).tolist() == [2.0 * number, 2.0 * number + 1]


def test_slots_keep_their_memory_and_replace_what_is_too_small() -> None:
    memory = SlotMemory()
    (first,), (second,) = memory(0, 100, CPU), memory(1, 100, CPU)
    assert first.data_ptr() != second.data_ptr()
    assert memory(0, 60, CPU)[0] is first
    assert memory(0, 200, CPU)[0].numel() == 200
    assert memory(1, 100, CPU)[0] is second


async def test_drawing_stops_when_two_buckets_are_not_released() -> None:
    drawn: list[str] = []
    stream = BucketStream(source_of_ten(drawn), capacity=1, memory=SlotMemory())
    released = 0
    async for bucket in stream:
        # Two whole buckets, and the tensor that showed that the second was full.
        assert len(drawn) <= released + 3
        released += 1
        bucket.release()
    await stream.finish()
    assert released == 10


async def test_a_slot_is_not_written_before_the_very_bucket_in_it_is_released() -> None:
    drawn: list[str] = []
    stream = BucketStream(source_of_ten(drawn), capacity=1, memory=SlotMemory())
    buckets = aiter(stream)
    first, second = await anext(buckets), await anext(buckets)
    second.release()  # the engines took them in another order
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(buckets), 0.05)
    assert_is_intact(first, 0)
    await stream.finish()
    assert_is_intact(first, 0)
    assert len(drawn) == 10


def assert_is_intact(bucket: Bucket, index: int) -> None:
    name, expected = weights(10)[index]
    ((found, tensor),) = bucket.tensors()
    assert found == name
    assert torch.equal(tensor, expected)


@pytest.mark.parametrize("live", [False, True])
async def test_a_reader_that_stops_leaves_the_source_drawn_to_its_end(live: bool) -> None:
    drawn: list[str] = []
    stream = BucketStream(source_of_ten(drawn, live=live), capacity=1, memory=SlotMemory())
    async for bucket in stream:
        await stream.finish()
        assert_is_intact(bucket, 0)
        break
    assert len(drawn) == 10


async def test_packing_that_fails_leaves_the_source_drawn_to_its_end() -> None:
    """As when no memory is left for the buffers that engines open."""
    drawn: list[str] = []

    def memory(slot: int, nbytes: int, device: torch.device) -> list[torch.Tensor]:
        if slot == 1:
            raise torch.OutOfMemoryError("no memory")
        return fresh(slot, nbytes, device)

    stream = BucketStream(source_of_ten(drawn), capacity=1, memory=memory)
    buckets = aiter(stream)
    await anext(buckets)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        await anext(buckets)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        await stream.finish()
    assert len(drawn) == 10


async def test_an_error_of_the_source_reaches_the_reader() -> None:
    def named_weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(1)
        raise RuntimeError("a rank is gone")

    stream = BucketStream(WeightSource(named_weights, 1), capacity=1, memory=SlotMemory())
    with pytest.raises(RuntimeError, match="a rank is gone"):
        await anext(aiter(stream))
