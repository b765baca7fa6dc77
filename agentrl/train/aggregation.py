"""How much each sampled token counts in the loss of one optimizer step.

The weights are fixed for the whole step before it is cut into micro-batches and spread over ranks,
so that the loss is a plain weighted sum however it was cut.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["token_weights"]


def token_weights(
    lengths: Sequence[int], aggregation: str, *, scale_factor: int = 1
) -> list[float]:
    """The weight of one token of each episode.

    Args:
        lengths: sampled tokens of each episode of the optimizer step; an episode without any has
            no part in a mean.
        aggregation: `token-mean`: every token of the step counts the same (arXiv:2503.14476);
            `seq-mean-token-sum`: the sum over an episode's tokens, averaged over episodes;
            `seq-mean-token-mean`: the mean over an episode's tokens, averaged over episodes
            (arXiv:2402.03300); `seq-mean-token-sum-norm`: the sum over an episode's tokens divided
            by a constant, averaged over episodes (arXiv:2503.20783).
        scale_factor: that constant, a length in tokens.

    Returns:
        One weight for each episode; 0 where there are no tokens.
    """
    episodes = sum(1 for length in lengths if length)
    tokens = sum(lengths)

    def weight(length: int) -> float:
        match aggregation:
            case "token-mean":
                return 1.0 / tokens
            case "seq-mean-token-sum":
                return 1.0 / episodes
            case "seq-mean-token-mean":
                return 1.0 / (episodes * length)
            case "seq-mean-token-sum-norm":
                return 1.0 / (episodes * scale_factor)
        raise ValueError(f"unknown aggregation {aggregation!r}")

    return [weight(length) if length else 0.0 for length in lengths]
