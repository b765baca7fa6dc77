"""Importance weights that correct for a sampler whose probabilities are not quite the learner's.

An engine computes with other kernels and often in another precision. The ratio of a token is its
probability under the learner, before the update, over that under the sampler that drew it; the
policy loss of a token is multiplied by a weight that is a function of ratios, without a gradient.
Denominators stay what they were: a masked token counts as a 0.

Shapes: N sampled tokens of one micro-batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from agentrl.config import CorrectionConfig
from agentrl.train.losses import importance_ratio
from agentrl.train.policy_losses import sequence_sum

__all__ = ["Correction", "correction_weights"]


class Correction(NamedTuple):
    """Weights [N]; which tokens had their ratio cut to the bound, and which are masked, bool."""

    weights_N: Tensor
    truncated_N: Tensor
    masked_N: Tensor


def correction_weights(
    learner_N: Tensor, sampler_N: Tensor, sequences_N: Tensor, config: CorrectionConfig
) -> Correction:
    """Weigh the tokens as `config.kind` says, with r the ratio of a token.

    - `none`: 1.
    - `tis`: min(r, high). Truncated importance sampling (arXiv:1802.01561, the weights of V-trace;
      for an engine's mismatch: verl's rollout correction).
    - `icepop`: r where low <= r <= high, else 0 (arXiv:2510.18855).
    - `mask`: 1 where low <= r <= high, else 0.
    - `seq_tis`, `seq_mask`: as `tis` and `mask` with r of the whole sequence, the product over its
      tokens, for each of them. Unbiased up to the bound, but of a variance that grows with length.

    Args:
        learner_N: log-probabilities under the learner before the update.
        sampler_N: those that the sampler reported.
        sequences_N: which sequence each token is of, int64 from 0 up.
        config: kind and bounds.
    """
    if config.kind in ("seq_tis", "seq_mask"):
        ratio_N = sequence_sum(learner_N - sampler_N, sequences_N).exp()
    else:
        ratio_N = importance_ratio(learner_N, sampler_N)
    ratio_N = ratio_N.detach()
    nowhere_N = torch.zeros_like(ratio_N, dtype=torch.bool)
    outside_N = (ratio_N < config.low) | (ratio_N > config.high)
    match config.kind:
        case "tis" | "seq_tis":
            return Correction(ratio_N.clamp(max=config.high), ratio_N > config.high, nowhere_N)
        case "icepop":
            return Correction(ratio_N.masked_fill(outside_N, 0.0), nowhere_N, outside_N)
        case "mask" | "seq_mask":
            return Correction((~outside_N).to(ratio_N.dtype), nowhere_N, outside_N)
        case "none":
            return Correction(torch.ones_like(ratio_N), nowhere_N, nowhere_N)
