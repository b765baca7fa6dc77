import numpy as np
import pytest
import torch
from torch import tensor

from agentrl.config import AlgoConfig
from agentrl.train.batch import Sample
from agentrl.train.microbatch import MicroBatch
from agentrl.train.objective import LossTerms, add_sums, loss_and_sums, loss_terms, means
from agentrl.train.scorer import TokenScores

LOGPROBS = tensor([-1.0, -2.0])


def terms(**fields) -> LossTerms:
    defaults = {
        "weights_N": tensor([0.5, 0.5]),
        "advantages_N": tensor([1.0, -1.0]),
        "sequences_N": tensor([0, 1]),
        "old_logprobs_N": None,
        "sampler_logprobs_N": None,
        "reference_logprobs_N": None,
        "old_values_N": None,
        "returns_N": None,
    }
    return LossTerms(**{**defaults, **fields})


def scores(values=None) -> TokenScores:
    return TokenScores(LOGPROBS.clone().requires_grad_(), tensor([0.4, 0.8]), values)


def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_the_plain_policy_gradient():
    result = scores()
    loss, sums = loss_and_sums(result, terms(), AlgoConfig())
    loss.backward()
    assert result.logprobs_N.grad.tolist() == [-0.5, 0.5]  # -weight * advantage
    assert means(sums)["ratio_mean"] == 1.0


def test_the_first_ratio_is_one_where_the_weights_have_not_changed():
    _, sums = loss_and_sums(scores(), terms(old_logprobs_N=LOGPROBS), AlgoConfig())
    assert means(sums)["ratio_mean"] == 1.0
    assert means(sums)["clip_fraction"] == 0.0


def test_the_loss_is_the_sum_of_its_parts():
    algo = AlgoConfig(
        advantage={"estimator": "gae"},
        kl={"coef": 2.0, "estimator": "k2"},
        value={"coef": 3.0, "clip": 0.0},
        entropy_coef=0.5,
    )
    values = tensor([1.0, 3.0], requires_grad=True)
    given = terms(
        reference_logprobs_N=tensor([-1.0, -1.0]),
        old_values_N=tensor([0.0, 0.0]),
        returns_N=tensor([1.0, 1.0]),
    )
    loss, sums = loss_and_sums(scores(values), given, algo)
    # policy: -(1 - 1) / 2; entropy: (0.4 + 0.8) / 2; KL: (0 + 1/2) / 2; value: (0 + 4/2) / 2
    assert loss.item() == pytest.approx(0.0 - 0.5 * 0.6 + 2 * 0.25 + 3 * 1.0)
    metrics = means(sums)
    assert metrics["entropy"] == pytest.approx(0.6)
    assert metrics["kl"] == pytest.approx(0.25)
    assert metrics["value_loss"] == pytest.approx(1.0)


def test_clipped_tokens_are_counted_as_a_share_of_the_trained_ones():
    old = LOGPROBS - tensor([1.0, 0.0])  # ratios e and 1, advantages 1 and -1
    _, sums = loss_and_sums(scores(), terms(old_logprobs_N=old), AlgoConfig())
    assert means(sums)["clip_fraction"] == 0.5
    assert means(sums)["ratio_mean"] == pytest.approx((np.e + 1) / 2)


def test_a_clip_is_counted_on_its_side():
    old = LOGPROBS + tensor([-1.0, 1.0])  # ratios e and 1/e, advantages 1 and -1
    metrics = means(loss_and_sums(scores(), terms(old_logprobs_N=old), AlgoConfig())[1])
    assert (metrics["clip_fraction_high"], metrics["clip_fraction_low"]) == (0.5, 0.5)
    assert metrics["clip_fraction"] == 1.0
    # k3 of KL(old || current): r - 1 - log r for both
    assert metrics["approx_kl"] == pytest.approx((np.e - 2 + 1 / np.e) / 2)


def test_a_correction_multiplies_the_policy_loss_alone():
    algo = AlgoConfig(correction={"kind": "icepop", "low": 0.5, "high": 3.0}, entropy_coef=0.5)
    sampler = LOGPROBS - tensor([2.0, 4.0]).log()  # ratios 2 and 4
    result = scores()
    loss, sums = loss_and_sums(result, terms(sampler_logprobs_N=sampler), algo)
    loss.backward()
    assert result.logprobs_N.grad.tolist() == pytest.approx([-1.0, 0.0])
    assert loss.item() == pytest.approx(-1.0 - 0.5 * 0.6)
    metrics = means(sums)
    assert metrics["mismatch/weight_mean"] == pytest.approx(1.0)
    assert (metrics["mismatch/masked"], metrics["mismatch/truncated"]) == (0.5, 0.0)


def test_a_kl_in_the_reward_is_counted_but_no_part_of_the_loss():
    algo = AlgoConfig(kl={"coef": 2.0, "estimator": "k2", "in_reward": True})
    given = terms(reference_logprobs_N=tensor([-1.0, -1.0]))
    loss, sums = loss_and_sums(scores(), given, algo)
    assert loss.item() == 0.0
    assert means(sums)["kl"] == pytest.approx(0.25)


def test_an_all_masked_batch_has_zero_loss_and_gradient_and_no_tokens():
    """(unsloth-zoo#1286)"""
    result = scores()
    loss, sums = loss_and_sums(result, terms(weights_N=torch.zeros(2)), AlgoConfig())
    loss.backward()
    assert loss.item() == 0.0
    assert result.logprobs_N.grad.tolist() == [0.0, 0.0]
    assert sums["tokens"] == 0.0
    assert all(np.isfinite(value) for value in means(sums).values())


def test_sums_of_parts_are_those_of_the_whole():
    whole = loss_and_sums(scores(), terms(), AlgoConfig())[1]
    halves = [
        loss_and_sums(
            TokenScores(LOGPROBS[[i]], tensor([0.4, 0.8])[[i]], None),
            terms(
                weights_N=tensor([0.5]),
                advantages_N=tensor([1.0, -1.0])[[i]],
                sequences_N=tensor([0]),
            ),
            AlgoConfig(),
        )[1]
        for i in (0, 1)
    ]
    assert add_sums(halves) == pytest.approx(whole)


def test_samples_without_weights_cannot_be_trained_on():
    sample = Sample(np.array([1, 2]), np.array([1])).with_fields(advantages=[1.0])
    with pytest.raises(ValueError, match="weights"):
        loss_terms(MicroBatch((sample,), (0,), 1), torch.device("cpu"))
