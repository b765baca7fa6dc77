"""What the learner minimises, and what it counts on the way.

Shapes: N sampled tokens of one micro-batch. All sums are over the tokens with weight > 0 and add up
over micro-batches and ranks; means are taken once, over the whole optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from agentrl.config import AlgoConfig
from agentrl.train.corrections import correction_weights
from agentrl.train.losses import KL_ESTIMATORS, kl_penalty, value_loss
from agentrl.train.losses import weighted_sum as weigh
from agentrl.train.microbatch import MicroBatch, token_field
from agentrl.train.policy_losses import POLICY_LOSSES, PolicyTokens
from agentrl.train.scorer import TokenScores

__all__ = [
    "LossTerms",
    "Sums",
    "add_sums",
    "loss_and_sums",
    "loss_terms",
    "means",
    "weighted_value_loss",
]

Sums: TypeAlias = dict[str, float]
"""Losses (already weighted), sums over tokens as `sum/...`, and the number of these `tokens`."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """What the loss needs besides the scores; [N] each, None where the loss has no use.

    All float32 but sequences_N: int64 from 0 up, which sequence each token is of.
    """

    weights_N: Tensor
    advantages_N: Tensor
    sequences_N: Tensor
    old_logprobs_N: Tensor | None
    sampler_logprobs_N: Tensor | None
    reference_logprobs_N: Tensor | None
    old_values_N: Tensor | None
    returns_N: Tensor | None


def loss_terms(micro_batch: MicroBatch, device: torch.device) -> LossTerms:
    """Collect the fields of the samples.

    Raises:
        ValueError: the samples have no weights or advantages.
    """
    weights_N = token_field(micro_batch, "weights", device)
    advantages_N = token_field(micro_batch, "advantages", device)
    if weights_N is None or advantages_N is None:
        raise ValueError("samples need weights and advantages before they can be trained on")
    # Only a correction needs them, and score_samples has made sure of that.
    reported = all(sample.sampler_logprobs is not None for sample in micro_batch.samples)
    lengths = torch.tensor(
        [sample.num_sampled for sample in micro_batch.samples], dtype=torch.int64, device=device
    )
    return LossTerms(
        weights_N,
        advantages_N,
        torch.repeat_interleave(lengths, output_size=len(weights_N)),
        old_logprobs_N=token_field(micro_batch, "old_logprobs", device),
        sampler_logprobs_N=(
            token_field(micro_batch, "sampler_logprobs", device) if reported else None
        ),
        reference_logprobs_N=token_field(micro_batch, "reference_logprobs", device),
        old_values_N=token_field(micro_batch, "old_values", device),
        returns_N=token_field(micro_batch, "returns", device),
    )


def loss_and_sums(scores: TokenScores, terms: LossTerms, algo: AlgoConfig) -> tuple[Tensor, Sums]:
    """The loss of one micro-batch (a scalar with gradient) and its sums.

    policy loss + kl.coef * KL - entropy_coef * entropy + value.coef * value loss, each token by its
    weight; the policy loss also by that of `algo.correction`. Without old log-probabilities the
    policy is its own denominator: the ratio is 1 and the gradient that of the plain policy
    gradient.
    """
    weights_N = terms.weights_N
    policy, per_token = _policy_loss(scores, terms, algo)
    loss = policy - algo.entropy_coef * weigh(scores.entropy_N, weights_N)
    per_token["entropy"] = scores.entropy_N
    losses = {"policy_loss": policy}
    if algo.kl.coef > 0 and terms.reference_logprobs_N is not None:
        kl_N = kl_penalty(scores.logprobs_N, terms.reference_logprobs_N, algo.kl.estimator)
        if not algo.kl.in_reward:
            loss = loss + algo.kl.coef * weigh(kl_N, weights_N)
        per_token["kl"] = kl_N
    if terms.returns_N is not None and scores.values_N is not None:
        losses["value_loss"] = weighted_value_loss(scores.values_N, terms, algo)
        loss = loss + algo.value.coef * losses["value_loss"]
    return loss, _count({**losses, "loss": loss}, per_token, weights_N)


def weighted_value_loss(values_N: Tensor, terms: LossTerms, algo: AlgoConfig) -> Tensor:
    """The value loss of one micro-batch, a scalar, for samples that have returns."""
    assert terms.returns_N is not None, "estimate_advantages makes returns where there are values"
    assert terms.old_values_N is not None, "returns come with the values they were made from"
    error_N = value_loss(values_N, terms.old_values_N, terms.returns_N, clip=algo.value.clip)
    return weigh(error_N, terms.weights_N)


def _policy_loss(
    scores: TokenScores, terms: LossTerms, algo: AlgoConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted policy loss, and what is counted of its tokens, [N] by name.

    approx_kl is the k3 estimate of KL(old || current); clip_fraction_low and _high say on which
    side of 1 the ratios were that met a bound.
    """
    old_N = terms.old_logprobs_N
    if old_N is None:
        old_N = scores.logprobs_N.detach()
    tokens = PolicyTokens(scores.logprobs_N, old_N, terms.advantages_N, terms.sequences_N)
    loss_N, ratio_N, clipped_N = POLICY_LOSSES[algo.loss.kind](tokens, algo.loss)
    per_token = {
        "ratio_mean": ratio_N,
        "approx_kl": KL_ESTIMATORS["k3"](old_N, scores.logprobs_N.detach()),
        "clip_fraction": clipped_N,
        "clip_fraction_low": clipped_N & (ratio_N < 1),
        "clip_fraction_high": clipped_N & (ratio_N > 1),
    }
    if algo.correction.kind != "none":
        assert terms.sampler_logprobs_N is not None, "score_samples refuses samples without them"
        correction = correction_weights(
            old_N, terms.sampler_logprobs_N, terms.sequences_N, algo.correction
        )
        loss_N = correction.weights_N * loss_N
        per_token |= {
            "mismatch/weight_mean": correction.weights_N,
            "mismatch/truncated": correction.truncated_N,
            "mismatch/masked": correction.masked_N,
        }
    return weigh(loss_N, terms.weights_N), per_token


def add_sums(parts: Iterable[Sums]) -> Sums:
    """Add up the sums of micro-batches and ranks by name, in the order given."""
    total: Sums = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total


def means(sums: Sums) -> dict[str, float]:
    """Turn the sums of one optimizer step into its metrics."""
    tokens = max(sums.get("tokens", 0.0), 1.0)
    return {
        name.removeprefix("sum/"): total / tokens if name.startswith("sum/") else total
        for name, total in sums.items()
        if name != "tokens"
    }


def _count(losses: dict[str, Tensor], per_token: dict[str, Tensor], weights_N: Tensor) -> Sums:
    trained_N = (weights_N != 0).float()
    names = [*losses, *(f"sum/{name}" for name in per_token), "tokens"]
    totals = [*losses.values(), *(weigh(x.detach().float(), trained_N) for x in per_token.values())]
    # One transfer from the device for all of them.
    numbers = torch.stack([*(total.detach() for total in totals), trained_N.sum()]).tolist()
    return dict(zip(names, numbers, strict=True))
