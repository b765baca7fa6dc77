from typing import get_args

import pytest
import torch
from torch import tensor

from agentrl.config import CorrectionConfig
from agentrl.train.corrections import correction_weights

KINDS = get_args(CorrectionConfig.model_fields["kind"].annotation)


def correct(kind: str, ratios: list[float], sequences: list[int] | None = None, **bounds):
    learner = tensor(ratios).log().requires_grad_()
    result = correction_weights(
        learner,
        torch.zeros(len(ratios)),
        tensor(sequences or range(len(ratios)), dtype=torch.int64),
        CorrectionConfig(kind=kind, **bounds),
    )
    assert not result.weights_N.requires_grad
    return [part.tolist() for part in result]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sampler_that_agrees_changes_nothing(kind: str):
    assert correct(kind, [1.0, 1.0]) == [[1.0, 1.0], [False, False], [False, False]]


def test_truncated_importance_sampling_cuts_large_ratios_and_keeps_small_ones():
    weights, truncated, masked = correct("tis", [0.1, 1.5, 8.0])
    assert weights == pytest.approx([0.1, 1.5, 2.0])
    assert truncated == [False, False, True]
    assert masked == [False, False, False]


def test_icepop_keeps_ratios_within_the_bounds_and_masks_the_rest():
    weights, truncated, masked = correct("icepop", [0.1, 0.6, 4.0, 8.0], low=0.5, high=5.0)
    assert weights == pytest.approx([0.0, 0.6, 4.0, 0.0])
    assert truncated == [False] * 4
    assert masked == [True, False, False, True]


def test_a_mask_keeps_tokens_as_they_are_or_drops_them():
    weights, _, masked = correct("mask", [0.1, 0.6, 1.9, 2.1])
    assert weights == [0.0, 1.0, 1.0, 0.0]
    assert masked == [True, False, False, True]


def test_a_sequence_has_the_product_of_its_tokens_ratios():
    weights, truncated, _ = correct("seq_tis", [2.0, 0.75, 2.0, 4.0], [0, 0, 1, 1])
    assert weights == pytest.approx([1.5, 1.5, 2.0, 2.0])
    assert truncated == [False, False, True, True]


def test_a_sequence_is_masked_as_a_whole():
    weights, _, masked = correct("seq_mask", [4.0, 0.25, 1.5, 1.5], [0, 0, 1, 1])
    assert weights == [1.0, 1.0, 0.0, 0.0]
    assert masked == [False, False, True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_no_tokens_give_no_weights(kind: str):
    assert correct(kind, []) == [[], [], []]


@pytest.mark.parametrize("kind", KINDS)
def test_an_outlier_keeps_its_weight_finite(kind: str):
    result = correction_weights(
        tensor([0.0, -800.0]), tensor([-800.0, 0.0]), tensor([0, 1]), CorrectionConfig(kind=kind)
    )
    assert result.weights_N.isfinite().all()
