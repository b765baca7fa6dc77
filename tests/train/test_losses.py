import math
from typing import get_args

import pytest
import torch
from torch import tensor

from agentrl.config import LossConfig
from agentrl.train.aggregation import token_weights
from agentrl.train.losses import (
    KL_ESTIMATORS,
    clipped_policy_loss,
    importance_ratio,
    kl_penalty,
    value_loss,
    weighted_sum,
)

AGGREGATIONS = get_args(LossConfig.model_fields["aggregation"].annotation)
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3}


def policy_terms(ratios: list[float], advantages: list[float]):
    old = torch.full((len(ratios),), -1.0)
    new = (old + tensor(ratios).log()).requires_grad_()
    loss, clipped = clipped_policy_loss(new, old, tensor(advantages), **CLIP)
    loss.sum().backward()
    return loss.detach(), clipped, new.grad


def test_the_policy_loss_is_the_negated_ratio_times_advantage_inside_the_clip_range():
    loss, clipped, gradient = policy_terms([1.0, 1.1, 0.9], [2.0, 2.0, -1.0])
    torch.testing.assert_close(loss, tensor([-2.0, -2.2, 0.9]))
    torch.testing.assert_close(gradient, tensor([-2.0, -2.2, 0.9]))
    assert clipped.tolist() == [False, False, False]


def test_the_clip_stops_a_good_token_above_the_upper_and_a_bad_one_below_the_lower_bound():
    loss, clipped, gradient = policy_terms([1.5, 0.5], [2.0, -1.0])
    torch.testing.assert_close(loss, tensor([-2.6, 0.8]))  # 1.3 * 2 and 0.8 * -1, negated
    assert gradient.tolist() == [0.0, 0.0]
    assert clipped.tolist() == [True, True]


def test_a_ratio_on_the_wrong_side_is_not_clipped():
    loss, clipped, _ = policy_terms([0.5, 1.5], [2.0, -1.0])
    torch.testing.assert_close(loss, tensor([-1.0, 1.5]))
    assert clipped.tolist() == [False, False]


def test_lower_and_upper_bound_are_separate():
    loss, clipped, _ = policy_terms([1.25], [1.0])
    torch.testing.assert_close(loss, tensor([-1.25]))
    assert clipped.tolist() == [False]


def test_the_first_ratio_is_one():
    logprobs = tensor([-0.3, -7.0])
    assert importance_ratio(logprobs, logprobs).tolist() == [1.0, 1.0]


def test_an_outlier_keeps_the_ratio_finite():
    assert importance_ratio(tensor([0.0]), tensor([-500.0])).isfinite().all()


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", math.log(2)),  # log p - log q with p = 1/2, q = 1/4
        ("k2", 0.5 * math.log(2) ** 2),
        ("k3", 0.5 - 1 + math.log(2)),  # q/p - 1 - log(q/p)
    ],
)
def test_kl_estimators_on_one_token(estimator: str, expected: float):
    policy, reference = tensor([0.5]).log(), tensor([0.25]).log()
    torch.testing.assert_close(KL_ESTIMATORS[estimator](policy, reference), tensor([expected]))
    torch.testing.assert_close(kl_penalty(policy, reference, estimator), tensor([expected]))


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_the_expected_gradient_of_a_kl_penalty_is_that_of_the_divergence(estimator: str):
    """Over all tokens, each weighted by its probability under the policy."""
    logits = tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    reference = tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    logprobs = logits.log_softmax(0)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits)
    logprobs = logits.log_softmax(0)
    estimate = (logprobs.exp().detach() * kl_penalty(logprobs, reference, estimator)).sum()
    (gradient,) = torch.autograd.grad(estimate, logits)
    torch.testing.assert_close(gradient, exact)


def test_k3_is_never_negative_and_zero_for_equal_policies():
    policy = torch.linspace(-5, 0, 11)
    assert (KL_ESTIMATORS["k3"](policy, policy.flip(0)) >= 0).all()
    assert KL_ESTIMATORS["k3"](policy, policy).tolist() == [0.0] * 11


def test_the_value_loss_is_half_the_squared_error_and_never_less_for_moving_further():
    values, old, returns = tensor([3.0, 0.1]), tensor([0.0, 0.0]), tensor([1.0, 1.0])
    plain = value_loss(values, old, returns, clip=0.0)
    torch.testing.assert_close(plain, tensor([2.0, 0.405]))
    # second token: inside the clip; first: |3 - 1| = 2 is worse than |0.2 - 1|
    torch.testing.assert_close(value_loss(values, old, returns, clip=0.2), tensor([2.0, 0.405]))
    # a value that reached its return too fast is charged for the clipped one: (0.2 - 1)^2 / 2
    jumped = value_loss(tensor([1.0]), tensor([0.0]), tensor([1.0]), clip=0.2)
    torch.testing.assert_close(jumped, tensor([0.32]))


def test_a_masked_token_has_no_part_even_where_its_term_is_not_a_number():
    terms = tensor([2.0, math.nan, math.inf], requires_grad=True)
    total = weighted_sum(terms, tensor([0.5, 0.0, 0.0]))
    total.backward()
    assert total.item() == 1.0
    assert terms.grad.tolist() == [0.5, 0.0, 0.0]


def test_a_batch_that_is_all_masked_gives_zero_loss_and_finite_gradients():
    """(unsloth-zoo#1286)"""
    logprobs = tensor([-1.0, -2.0], requires_grad=True)
    loss, _ = clipped_policy_loss(logprobs, tensor([-1.5, -0.1]), tensor([1.0, -1.0]), **CLIP)
    total = weighted_sum(loss, torch.zeros(2))
    total.backward()
    assert total.item() == 0.0
    assert logprobs.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", [0.25, 0.25]),  # 1 + 3 tokens
        ("seq-mean-token-sum", [0.5, 0.5]),
        ("seq-mean-token-mean", [0.5, 1 / 6]),
        ("seq-mean-token-sum-norm", [1 / 20, 1 / 20]),  # 2 episodes, a length of 10
    ],
)
def test_aggregations_weigh_the_tokens_of_episodes_of_one_and_three_tokens(aggregation, expected):
    assert token_weights([1, 3], aggregation, scale_factor=10) == pytest.approx(expected)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_an_episode_that_is_filtered_out_is_no_part_of_the_denominator(aggregation: str):
    """Two rows, one filtered: the loss equals the kept row's (trl#6439)."""
    kept, filtered = token_weights([3, 0], aggregation)
    assert [kept] == token_weights([3], aggregation)
    assert filtered == 0.0


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_no_tokens_at_all_give_weights_of_zero(aggregation: str):
    assert token_weights([0, 0], aggregation) == [0.0, 0.0]
