"""Which episodes belong to a share of them: a function of the rollout_id and of nothing else.

A retry of an episode, and a run that is resumed, choose as the first one did.
"""

from __future__ import annotations

import hashlib

__all__ = ["is_chosen"]


def is_chosen(rollout_id: str, share: float) -> bool:
    """True for a fraction `share` of all ids; an id chosen at one share is so at every larger one.

    Args:
        rollout_id: names the episode.
        share: 0 chooses none, 1 all.
    """
    digest = hashlib.sha256(rollout_id.encode()).digest()
    return int.from_bytes(digest[:7], "big") / (1 << 56) < share
