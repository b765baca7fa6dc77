"""Weights in buckets: every byte once, few bytes at a time, and the source always to its end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from agentrl.engines.base import WeightSource
from agentrl.engines.transport.buckets import BucketStream, pack


def weights(count: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(f"layer.{i}", torch.randn(3, i + 1, generator=generator)) for i in range(count)]


@pytest.mark.parametrize("capacity", [1, 100, 1000, 1 << 20])
def test_every_tensor_comes_out_as_it_went_in(capacity: int) -> None:
    given = weights(20)
    found = [pair for bucket in pack(iter(given), capacity) for pair in bucket.tensors()]
    assert [name for name, _ in found] == [name for name, _ in given]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(given, found, strict=True))


def test_a_bucket_is_no_larger_than_its_capacity_unless_one_tensor_is() -> None:
    buckets = list(pack(iter(weights(20)), 200))
    assert all(b.flat.numel() <= 200 or len(b.specs) == 1 for b in buckets)
    assert 1 < len(buckets) < 20


def test_dtypes_are_not_mixed_and_survive() -> None:
    given = [("a", torch.ones(3, dtype=torch.bfloat16)), ("b", torch.ones(2)), ("c", torch.ones(2))]
    buckets = list(pack(iter(given), 1 << 20))
    assert [[spec.dtype for spec in b.specs] for b in buckets] == [["bfloat16"], ["float32"] * 2]


def test_a_tensor_may_change_as_soon_as_the_next_is_drawn() -> None:
    # trl#6765: a gathered tensor is a view that does not outlive its turn.
    def drawn() -> Iterator[tuple[str, torch.Tensor]]:
        buffer = torch.empty(4)
        for i in range(3):
            buffer.fill_(i)
            yield f"layer.{i}", buffer
        buffer.fill_(-1)

    found = dict(pair for bucket in pack(drawn(), 1 << 20) for pair in bucket.tensors())
    assert [int(found[f"layer.{i}"][0]) for i in range(3)] == [0, 1, 2]


async def test_drawing_runs_at_most_two_buckets_ahead_of_what_is_sent() -> None:
    drawn: list[str] = []

    def named_weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights(10):
            drawn.append(name)
            yield name, tensor

    stream = BucketStream(WeightSource(named_weights, 1), capacity=1)
    sent = 0
    async for bucket in stream:
        # Two whole buckets, and the tensor that showed that the second was full.
        assert len(drawn) <= sent + 3
        sent += len(bucket.specs)
    await stream.finish()
    assert sent == 10


async def test_a_reader_that_stops_leaves_the_source_drawn_to_its_end() -> None:
    drawn: list[str] = []

    def named_weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights(10):
            drawn.append(name)
            yield name, tensor

    stream = BucketStream(WeightSource(named_weights, 1), capacity=1)
    async for _ in stream:
        break
    await stream.finish()
    assert len(drawn) == 10


async def test_an_error_of_the_source_reaches_the_reader() -> None:
    def named_weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(1)
        raise RuntimeError("a rank is gone")

    stream = BucketStream(WeightSource(named_weights, 1), capacity=1)
    with pytest.raises(RuntimeError, match="a rank is gone"):
        async for _ in stream:
            pass
