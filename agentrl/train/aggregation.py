"""How much each sampled token counts in the loss of one optimizer step.

The weights are fixed for the whole step before it is cut into micro-batches and spread over ranks,
so that the loss is a plain weighted sum however it was cut.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["token_weights"]


def token_weights(lengths: Sequence[int], aggregation: str) -> list[float]:
    """The weight of one token of each episode.

    Args:
        lengths: sampled tokens of each episode of the optimizer step; an episode without any has
            no part in a mean.
        aggregation: `token-mean`: every token of the step counts the same (arXiv:2503.14476);
            `seq-mean-token-sum`: the sum over an episode's tokens, averaged over episodes;
            `seq-mean-token-mean`: the mean over an episode's tokens, averaged over episodes
            (arXiv:2402.03300).

    Returns:
        One weight for each episode; 0 where there are no tokens.
    """
    episodes = sum(1 for length in lengths if length)
    tokens = sum(lengths)
    if aggregation == "token-mean":
        return [1.0 / tokens if length else 0.0 for length in lengths]
    if aggregation == "seq-mean-token-sum":
        return [1.0 / episodes if length else 0.0 for length in lengths]
    if aggregation == "seq-mean-token-mean":
        return [1.0 / (episodes * length) if length else 0.0 for length in lengths]
    raise ValueError(f"unknown aggregation {aggregation!r}")
