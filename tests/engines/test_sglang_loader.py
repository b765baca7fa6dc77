"""The loader inside SGLang: loads, proves, copies, and loads what no plan knows."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator

import pytest
import torch
from engines.loaders import FusedModel, Named, bytes_of, new_weights, split

from agentrl.engines import sglang_loader


class CountingModel(FusedModel):
    """Counts what its own loader was given; a load without values, as a plan makes it, aside."""

    loaded = 0

    def load_weights(self, weights: Named | Iterator[tuple[str, torch.Tensor]]) -> None:
        given = list(weights)
        self.loaded += sum(not tensor.is_meta for _, tensor in given)
        super().load_weights(given)


def update(model: CountingModel, weights: Named, size: int = 5, *, announced: bool = False) -> int:
    """Send the weights; returns how many of them the model's loader was given.

    `announced`: how many buckets there are is known beforehand.
    """
    before, update_id = model.loaded, uuid.uuid4().hex
    buckets = list(split(weights, size))
    for bucket in buckets:
        specs = [[name, "float32", list(tensor.shape)] for name, tensor in bucket]
        flat = torch.cat([tensor.flatten() for _, tensor in bucket]).view(torch.uint8)
        parts = len(buckets) if announced else None
        facts = {"update": update_id, "parts": parts, "specs": specs}
        sglang_loader.load(model, [(json.dumps(facts), flat)])
        flat.fill_(255)  # the learner writes the next bucket there
    if not announced:
        sglang_loader.load(model, [])
    return model.loaded - before


def assert_holds(model: CountingModel, weights: Named) -> None:
    expected = FusedModel()
    expected.load_weights(weights)
    assert bytes_of(model) == bytes_of(expected)


@pytest.mark.parametrize("announced", [False, True])
def test_the_third_update_and_all_later_ones_are_copies(
    caplog: pytest.LogCaptureFixture, announced: bool
) -> None:
    caplog.set_level(logging.INFO)
    model = CountingModel()
    for seed, loaded in enumerate([12, 12, 0, 0]):
        weights = new_weights(seed)
        assert update(model, weights, size=seed + 3, announced=announced) == loaded
        assert_holds(model, new_weights(seed))
    assert caplog.messages == ["weights are copied in place from now on: 11 copies"]


def test_a_bucket_with_a_weight_of_another_shape_is_loaded_and_a_new_plan_made() -> None:
    model = CountingModel()
    for seed in range(2):
        update(model, new_weights(seed)[:-1])  # without the tied head, which is passed over
    # The head, not seen before, is in the last bucket of two: the first was copied already.
    assert update(model, new_weights(3), size=6) == 6
    assert_holds(model, new_weights(3))
    assert [update(model, new_weights(seed)) for seed in (4, 5)] == [12, 0]
    assert_holds(model, new_weights(5))


def test_after_an_update_that_lacked_a_weight_the_next_is_loaded() -> None:
    model = CountingModel()
    for seed in range(2):
        update(model, new_weights(seed))
    assert update(model, new_weights(2)[:-2]) == 0
    assert update(model, new_weights(3)) == 12
    assert_holds(model, new_weights(3))


def test_an_update_that_ended_halfway_changes_nothing_for_the_next() -> None:
    model = CountingModel()
    for seed in range(2):
        update(model, new_weights(seed))
    (bucket, *_) = split(new_weights(7), 5)
    specs = [[name, "float32", list(tensor.shape)] for name, tensor in bucket]
    flat = torch.cat([tensor.flatten() for _, tensor in bucket]).view(torch.uint8)
    sglang_loader.load(
        model, [(json.dumps({"update": "ended", "parts": None, "specs": specs}), flat)]
    )
    assert update(model, new_weights(8)) == 0
    assert_holds(model, new_weights(8))


def test_buckets_may_come_in_any_order() -> None:
    model = CountingModel()
    for seed, loaded in enumerate([12, 12, 0]):
        weights = new_weights(seed)
        assert update(model, weights[::-1] if seed % 2 else weights) == loaded
        assert_holds(model, weights)


def test_a_target_and_a_draft_model_are_kept_apart() -> None:
    target, draft = CountingModel(), CountingModel()
    for seed in range(2):
        update(target, new_weights(seed))
    assert update(draft, new_weights(2)) == 12
    assert update(target, new_weights(3)) == 0
    assert_holds(target, new_weights(3))
    assert_holds(draft, new_weights(2))
