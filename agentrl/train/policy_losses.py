"""Policy losses by name: one term per token, whatever the aggregation.

Shapes: N sampled tokens of one micro-batch. To add a loss write a function of the type
`PolicyLoss` and enter it in `POLICY_LOSSES`; `algo.loss.kind` names it. Each is homogeneous in the
advantages: multiplied by a weight of 0 or more, they multiply the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from agentrl.config import LossConfig
from agentrl.train.losses import MAX_LOG_RATIO, clipped_policy_loss, importance_ratio

__all__ = [
    "POLICY_LOSSES",
    "PolicyLoss",
    "PolicyTerms",
    "PolicyTokens",
    "cispo",
    "gspo",
    "ppo",
    "reinforce",
    "sapo",
    "sequence_mean",
    "sequence_sum",
]


class PolicyTokens(NamedTuple):
    """What a policy loss is made of, each [N].

    Log-probabilities under the current policy (with gradient) and under the old one, advantages,
    and which sequence each token is of: int64 from 0 up.
    """

    logprobs_N: Tensor
    old_logprobs_N: Tensor
    advantages_N: Tensor
    sequences_N: Tensor


class PolicyTerms(NamedTuple):
    """Loss, importance ratio, and whether a bound on the ratio took effect (bool), each [N]."""

    loss_N: Tensor
    ratio_N: Tensor
    clipped_N: Tensor


PolicyLoss: TypeAlias = Callable[[PolicyTokens, LossConfig], PolicyTerms]


def ppo(tokens: PolicyTokens, config: LossConfig) -> PolicyTerms:
    """The clipped surrogate (arXiv:1707.06347), with a dual clip if wanted (arXiv:1912.09729).

    The dual clip keeps the ratio of a token with negative advantage at `clip_ratio_c` or less,
    where the clipped surrogate alone has no bound.
    """
    loss_N, clipped_N = clipped_policy_loss(
        tokens.logprobs_N,
        tokens.old_logprobs_N,
        tokens.advantages_N,
        clip_ratio_low=config.clip_ratio_low,
        clip_ratio_high=config.clip_ratio_high,
    )
    ratio_N = importance_ratio(tokens.logprobs_N, tokens.old_logprobs_N)
    if config.clip_ratio_c > 0:
        dual_N = (tokens.advantages_N < 0) & (ratio_N > config.clip_ratio_c)
        loss_N = torch.where(dual_N, -config.clip_ratio_c * tokens.advantages_N, loss_N)
        clipped_N = clipped_N | dual_N
    return PolicyTerms(loss_N, ratio_N, clipped_N)


def gspo(tokens: PolicyTokens, config: LossConfig) -> PolicyTerms:
    """The clipped surrogate with one ratio for a whole sequence (arXiv:2507.18071, section 4).

    s = (pi(sequence) / pi_old(sequence)) ^ (1 / length). Each token has the value of s and its own
    part of the gradient (the token-level form there), so that advantages may differ
    within a sequence; with one advantage and a mean over its tokens the gradient is that of s.
    """
    log_ratio_N = tokens.logprobs_N - tokens.old_logprobs_N
    mean_N = sequence_mean(log_ratio_N.detach(), tokens.sequences_N)
    old_N = tokens.logprobs_N.detach() - mean_N
    loss_N, clipped_N = clipped_policy_loss(
        tokens.logprobs_N,
        old_N,
        tokens.advantages_N,
        clip_ratio_low=config.clip_ratio_low,
        clip_ratio_high=config.clip_ratio_high,
    )
    return PolicyTerms(loss_N, importance_ratio(tokens.logprobs_N, old_N), clipped_N)


def cispo(tokens: PolicyTokens, config: LossConfig) -> PolicyTerms:
    """Policy gradient weighted by the clipped ratio (CISPO, arXiv:2506.13585).

    The ratio is a weight without a gradient, so that a clipped token still has one. The paper sets
    no lower bound: `clip_ratio_low` of 1 or more.
    """
    ratio_N = importance_ratio(tokens.logprobs_N, tokens.old_logprobs_N).detach()
    weight_N = ratio_N.clamp(1.0 - config.clip_ratio_low, 1.0 + config.clip_ratio_high)
    loss_N = -weight_N * tokens.advantages_N * tokens.logprobs_N
    return PolicyTerms(loss_N, ratio_N, weight_N != ratio_N)


def sapo(tokens: PolicyTokens, config: LossConfig) -> PolicyTerms:
    """A soft gate on the ratio in place of the clip (SAPO, arXiv:2511.20347).

    -4 / tau * sigmoid(tau * (r - 1)) * A: at r = 1 its gradient is that of r * A, and it fades out
    on both sides, sooner for negative advantages where `tau_neg` is above `tau_pos`.
    """
    ratio_N = importance_ratio(tokens.logprobs_N, tokens.old_logprobs_N)
    positive_N = tokens.advantages_N > 0
    tau_N = torch.where(positive_N, config.tau_pos, config.tau_neg).to(ratio_N.dtype)
    gate_N = 4.0 / tau_N * torch.sigmoid(tau_N * (ratio_N - 1.0))
    return PolicyTerms(-gate_N * tokens.advantages_N, ratio_N, torch.zeros_like(positive_N))


def reinforce(tokens: PolicyTokens, config: LossConfig) -> PolicyTerms:
    """The plain policy gradient, -A * log pi (Williams 1992): no ratio, no clip."""
    loss_N = -tokens.advantages_N * tokens.logprobs_N
    ratio_N = importance_ratio(tokens.logprobs_N, tokens.old_logprobs_N)
    return PolicyTerms(loss_N, ratio_N, torch.zeros_like(loss_N, dtype=torch.bool))


POLICY_LOSSES: Mapping[str, PolicyLoss] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "reinforce": reinforce,
}


def sequence_sum(values_N: Tensor, sequences_N: Tensor) -> Tensor:
    """For each token the sum over its whole sequence, kept within +-`MAX_LOG_RATIO`. [N]."""
    return _sums(values_N, sequences_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_mean(values_N: Tensor, sequences_N: Tensor) -> Tensor:
    """For each token the mean over its whole sequence. [N]."""
    return _sums(values_N, sequences_N) / _sums(torch.ones_like(values_N), sequences_N)


def _sums(values_N: Tensor, sequences_N: Tensor) -> Tensor:
    # There are at most as many sequences as tokens, so that no size has to come from the device.
    totals = torch.zeros_like(values_N).index_add(0, sequences_N, values_N)
    return totals[sequences_N]
