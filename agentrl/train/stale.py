"""What becomes of tokens that were sampled by weights older than `train.max_staleness` allows.

Tokens are judged one by one when their batch is formed: those of a version below `oldest`, which is
the version that is trained less `train.max_staleness`, are too old. With `train.stale` `wait` there
are none, because the batch waits for what would become too old (see `ahead`); should an engine
report an older version all the same, its tokens are masked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from agentrl.config import TrainConfig
from agentrl.executors.groups import RolloutGroup, RolloutResult
from agentrl.types import Trajectory

__all__ = ["drop_stale", "oldest_trained", "stale_metrics", "staleness_metrics"]


def oldest_trained(version: int, train: TrainConfig) -> int | None:
    """The version before which no token gives a gradient in the update of `version`; None where
    each one does, or where `drop_stale` has seen to it."""
    if train.max_staleness == 0 or train.stale not in ("wait", "mask"):
        return None
    return version - train.max_staleness


def drop_stale(result: RolloutResult, oldest: int, min_group_size: int) -> RolloutResult:
    """Take the episodes with a token that is too old out of their groups; they stay in `outcomes`.

    A group in which fewer than `min_group_size` scored episodes are left is dropped and counted.
    """
    kept = [
        replace(
            group, trajectories=tuple(t for t in group.trajectories if _oldest_version(t) >= oldest)
        )
        for group in result.groups
    ]
    groups: tuple[RolloutGroup, ...] = tuple(g for g in kept if len(g.rewards) >= min_group_size)
    lost = len(result.groups) - len(groups)
    return replace(result, groups=groups, num_dropped_groups=result.num_dropped_groups + lost)


def staleness_metrics(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """By how many versions the sampled tokens are older than `version`: mean and most."""
    ages = version - _versions(trajectories)
    if len(ages) == 0:
        return {}
    return {"staleness/mean": float(ages.mean()), "staleness/max": float(ages.max())}


def stale_metrics(result: RolloutResult, oldest: int, what: str) -> dict[str, float]:
    """How many episodes were left out of the groups for their age, and their mean length; or which
    share of the tokens is masked, or kept although it is too old.

    Args:
        result: the batch.
        oldest: version of the oldest token that is not too old.
        what: `train.stale`.
    """
    if what == "drop":
        scored = [
            t for t in result.outcomes if t.reward is not None and _oldest_version(t) < oldest
        ]
        metrics = {"staleness/dropped_episodes": float(len(scored))}
        if scored:
            metrics["staleness/dropped_length"] = float(np.mean([t.num_sampled for t in scored]))
        return metrics
    is_stale = _versions(result.trajectories) < oldest
    if len(is_stale) == 0 or (what == "wait" and not is_stale.any()):
        return {}
    name = "kept" if what == "keep" else "masked"
    return {f"staleness/{name}_share": float(np.mean(is_stale))}


def _oldest_version(trajectory: Trajectory) -> float:
    """The oldest version among an episode's sampled tokens."""
    versions = _versions([trajectory])
    return float(versions.min()) if len(versions) else np.inf


def _versions(trajectories: Iterable[Trajectory]) -> NDArray[np.int32]:
    """The versions of all sampled tokens."""
    sampled = [
        sequence.weight_versions[sequence.response_mask]
        for trajectory in trajectories
        for sequence in trajectory.sequences
    ]
    return np.concatenate([np.empty(0, np.int32), *sampled])
