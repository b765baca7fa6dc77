"""Losses: pure functions on tensors, one term per token, and how terms become one number.

Shapes: N sampled tokens. Every function is differentiable in its first argument. Masks are
weights: a token of weight 0 has no part in a loss or a gradient, whatever its term is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

__all__ = [
    "KL_ESTIMATORS",
    "MAX_LOG_RATIO",
    "clipped_policy_loss",
    "importance_ratio",
    "kl_penalty",
    "value_loss",
    "weighted_sum",
]

MAX_LOG_RATIO = 20.0
"""Log-ratios are kept within this, so that exp() of an outlier stays finite."""


def weighted_sum(terms_N: Tensor, weights_N: Tensor) -> Tensor:
    """Sum terms by weight; nothing of a token with weight 0 gets through, not even NaN or inf."""
    masked_N = torch.where(weights_N != 0, terms_N, torch.zeros_like(terms_N))
    return (masked_N * weights_N).sum()


def importance_ratio(logprobs_N: Tensor, old_logprobs_N: Tensor) -> Tensor:
    """Probability of each token under the policy over that under the policy that sampled it."""
    return (logprobs_N - old_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_policy_loss(
    logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> tuple[Tensor, Tensor]:
    """The clipped surrogate objective (PPO, arXiv:1707.06347, equation 7), negated.

    -min(r * A, clip(r, 1 - low, 1 + high) * A); a higher upper bound is arXiv:2503.14476.

    Returns:
        Loss per token [N]; whether the clip took the token's gradient away, bool [N].
    """
    ratio_N = importance_ratio(logprobs_N, old_logprobs_N)
    clipped_N = ratio_N.clamp(1.0 - clip_ratio_low, 1.0 + clip_ratio_high)
    surrogate_N, clipped_surrogate_N = ratio_N * advantages_N, clipped_N * advantages_N
    return (
        -torch.minimum(surrogate_N, clipped_surrogate_N),
        clipped_surrogate_N < surrogate_N,
    )


def value_loss(values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, *, clip: float) -> Tensor:
    """Half the squared error of the value head, with the clip of PPO's reference implementation.

    The larger of the errors of v and of v kept within `clip` of the old value; `clip` 0: of v only.
    Returns the loss per token [N].
    """
    error_N = (values_N - returns_N).square()
    if clip > 0:
        near_N = old_values_N + (values_N - old_values_N).clamp(-clip, clip)
        error_N = torch.maximum(error_N, (near_N - returns_N).square())
    return 0.5 * error_N


def _k1(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    return logprobs_N - reference_N


def _k2(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    return 0.5 * (logprobs_N - reference_N).square()


def _k3(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    log_ratio_N = (reference_N - logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(log_ratio_N) - log_ratio_N


KL_ESTIMATORS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3}
"""Estimates per token of KL(policy || reference) from the log-probabilities of sampled tokens
(http://joschu.net/blog/kl-approx.html). Arguments: policy [N], reference [N]."""


def kl_penalty(logprobs_N: Tensor, reference_N: Tensor, estimator: str) -> Tensor:
    """Distance to the reference as a loss per token [N].

    The gradient of k1 has expectation 0 for tokens that the policy sampled, so that as a loss it
    would only add noise: k1 keeps its value and takes the gradient of k2, which in expectation is
    that of the divergence.
    """
    terms_N = KL_ESTIMATORS[estimator](logprobs_N, reference_N)
    if estimator == "k1":
        proxy_N = _k2(logprobs_N, reference_N)
        return terms_N.detach() + proxy_N - proxy_N.detach()
    return terms_N
