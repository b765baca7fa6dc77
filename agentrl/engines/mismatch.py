"""How far the sampler's log-probabilities lie from the learner's, for the same tokens.

T tokens. The log-ratio is log pi_learner - log pi_sampler: 0 where both agree.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["mismatch_metrics"]


def mismatch_metrics(
    sampler_logprobs_T: NDArray[np.float32],
    learner_logprobs_T: NDArray[np.float32],
    mask_T: NDArray[np.bool_],
) -> dict[str, float]:
    """Mean and maximum of |log-ratio|, mean ratio, and the k3 estimate of KL(sampler || learner).

    The expectation of the ratio is 1, however far apart both are.
    k3 is exp(d) - 1 - d with d the log-ratio (http://joschu.net/blog/kl-approx.html): unbiased for
    tokens that the sampler drew, and never negative. Empty where the mask is.

    Raises:
        ValueError: a sampled token has no log-probability on one side.
    """
    sampler = np.asarray(sampler_logprobs_T, dtype=np.float64)[mask_T]
    learner = np.asarray(learner_logprobs_T, dtype=np.float64)[mask_T]
    if np.isnan(sampler).any() or np.isnan(learner).any():
        raise ValueError("a token under the mask has no log-probability")
    if sampler.size == 0:
        return {}
    log_ratio = learner - sampler
    return {
        "mismatch/log_ratio_mean": float(np.abs(log_ratio).mean()),
        "mismatch/log_ratio_max": float(np.abs(log_ratio).max()),
        "mismatch/ratio_mean": float(np.exp(log_ratio).mean()),
        "mismatch/kl": float((np.exp(log_ratio) - 1.0 - log_ratio).mean()),
    }
