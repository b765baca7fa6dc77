import math
from typing import get_args

import pytest
import torch
from torch import tensor

from agentrl.config import LossConfig
from agentrl.train.policy_losses import (
    POLICY_LOSSES,
    PolicyTokens,
    sequence_mean,
    sequence_sum,
)


def loss_of(
    kind: str, ratios: list[float], advantages: list[float], sequences: list[int] | None = None,
    **settings,
):  # fmt: skip
    """Loss, gradient by log-probability, ratio and clipped, as lists; old log-probability -1."""
    old = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    new = (old + tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    tokens = PolicyTokens(
        new,
        old,
        tensor(advantages, dtype=torch.float64),
        tensor(sequences or range(len(ratios))),
    )
    terms = POLICY_LOSSES[kind](tokens, LossConfig(kind=kind, **settings))
    terms.loss_N.sum().backward()
    return (
        terms.loss_N.tolist(),
        new.grad.tolist(),
        terms.ratio_N.tolist(),
        terms.clipped_N.tolist(),
    )


def test_every_name_of_the_configuration_has_a_loss():
    assert set(get_args(LossConfig.model_fields["kind"].annotation)) == set(POLICY_LOSSES)


@pytest.mark.parametrize("kind", sorted(POLICY_LOSSES))
def test_where_nothing_has_moved_every_gradient_is_the_plain_policy_gradient(kind: str):
    _, gradient, ratio, _ = loss_of(kind, [1.0, 1.0, 1.0], [2.0, -1.0, 0.0], [0, 0, 1])
    assert gradient == pytest.approx([-2.0, 1.0, 0.0])
    assert ratio == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", sorted(POLICY_LOSSES))
def test_a_weight_on_the_advantages_multiplies_the_loss(kind: str):
    ratios, advantages = [0.5, 1.1, 1.9], [1.0, -2.0, -1.0]
    loss, *_ = loss_of(kind, ratios, advantages)
    tripled, *_ = loss_of(kind, ratios, [3 * a for a in advantages])
    assert tripled == pytest.approx([3 * x for x in loss])


@pytest.mark.parametrize("kind", sorted(POLICY_LOSSES))
def test_no_tokens_give_no_terms(kind: str):
    empty = torch.empty(0)
    tokens = PolicyTokens(empty, empty, empty, torch.empty(0, dtype=torch.int64))
    assert all(len(term) == 0 for term in POLICY_LOSSES[kind](tokens, LossConfig(kind=kind)))


def test_ppo_takes_the_gradient_of_a_token_beyond_its_bound():
    loss, gradient, _, clipped = loss_of("ppo", [1.5, 0.5, 1.5], [2.0, -1.0, -1.0])
    assert loss == pytest.approx([-2.4, 0.8, 1.5])
    assert gradient == pytest.approx([0.0, 0.0, 1.5])
    assert clipped == [True, True, False]


def test_the_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely():
    loss, gradient, _, clipped = loss_of("ppo", [5.0, 2.5, 5.0], [-1.0, -1.0, 1.0],
                                         clip_ratio_c=3.0)  # fmt: skip
    assert loss == pytest.approx([3.0, 2.5, -1.2])  # 3 * 1; within 3; clipped at 1.2 as ever
    assert gradient == pytest.approx([0.0, 2.5, 0.0])
    assert clipped == [True, False, True]


def test_gspo_has_one_ratio_for_a_sequence_the_geometric_mean():
    # (2 * 1/2)^(1/2) = 1, (4 * 1)^(1/2) = 2
    loss, gradient, ratio, clipped = loss_of(
        "gspo", [2.0, 0.5, 4.0, 1.0], [1.0, 1.0, -1.0, -1.0], [0, 0, 1, 1]
    )
    assert ratio == pytest.approx([1, 1, 2, 2])
    assert loss == pytest.approx([-1, -1, 2, 2])
    assert gradient == pytest.approx([-1, -1, 2, 2])
    assert clipped == [False] * 4


def test_gspo_clips_whole_sequences():
    loss, gradient, _, clipped = loss_of(
        "gspo", [4.0, 1.0, 1.0], [1.0, 1.0, 1.0], [0, 0, 1],
        clip_ratio_low=3e-4, clip_ratio_high=0.5,
    )  # fmt: skip
    assert loss == pytest.approx([-1.5, -1.5, -1.0])
    assert gradient == pytest.approx([0.0, 0.0, -1.0])
    assert clipped == [True, True, False]


def test_the_gradient_of_gspo_is_that_of_the_sequence_ratio():
    """With a mean over tokens, one advantage: of -A * (prod r)^(1/3)."""
    old = tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    new = (old + tensor([0.1, -0.05, 0.03], dtype=torch.float64)).requires_grad_()
    tokens = PolicyTokens(new, old, torch.full((3,), 1.7, dtype=torch.float64), tensor([0, 0, 0]))
    (token_level,) = torch.autograd.grad(
        POLICY_LOSSES["gspo"](tokens, LossConfig(kind="gspo")).loss_N.mean(), new
    )
    (exact,) = torch.autograd.grad(-1.7 * (new - old).mean().exp(), new)
    torch.testing.assert_close(token_level, exact)


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    loss, gradient, _, clipped = loss_of("cispo", [1.5, 0.5, 1.1], [2.0, -1.0, 1.0])
    # weights 1.2, 0.8, 1.1; log-probabilities -1 + log ratio
    expected = [2.4 * (1 - math.log(1.5)), -0.8 * (1 - math.log(0.5)), 1.1 * (1 - math.log(1.1))]
    assert loss == pytest.approx(expected)
    assert gradient == pytest.approx([-2.4, 0.8, -1.1])
    assert clipped == [True, True, False]


def test_cispo_has_no_lower_bound_where_it_is_set_to_one():
    _, gradient, _, clipped = loss_of("cispo", [0.01], [1.0], clip_ratio_low=1.0)
    assert gradient == pytest.approx([-0.01])
    assert clipped == [False]


def test_sapo_closes_its_gate_softly_and_sooner_for_negative_advantages():
    loss, gradient, *_ = loss_of("sapo", [2.0, 2.0], [1.0, -1.0], tau_pos=1.0, tau_neg=2.0)
    positive, negative = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-2))
    assert loss == pytest.approx([-4 * positive, 2 * negative])
    # by log-probability: 4 * sigmoid * (1 - sigmoid) * r
    assert gradient == pytest.approx(
        [-8 * positive * (1 - positive), 8 * negative * (1 - negative)]
    )
    assert abs(gradient[1]) < abs(gradient[0]) < 2.0


def test_reinforce_ignores_ratios():
    loss, gradient, ratio, clipped = loss_of("reinforce", [5.0, 0.1], [1.0, -2.0])
    assert loss == pytest.approx([1 - math.log(5), -2 * (1 - math.log(0.1))])
    assert gradient == [-1.0, 2.0]
    assert ratio == pytest.approx([5.0, 0.1])
    assert clipped == [False, False]


def test_sums_and_means_are_over_each_sequence_wherever_its_tokens_stand():
    values, sequences = tensor([1.0, 10.0, 3.0]), tensor([0, 1, 0])
    assert sequence_sum(values, sequences).tolist() == [4.0, 10.0, 4.0]
    assert sequence_mean(values, sequences).tolist() == [2.0, 10.0, 2.0]
    assert sequence_sum(tensor([300.0]), tensor([0])).exp().isfinite().all()
