"""Which episodes of a batch are trained on.

Shapes: E episodes. Left out are episodes that cannot be scored, that hold no token drawn at random,
that were cut (`loss.mask_truncated`), and, for a group estimator, groups in which nothing tells the
members apart. An episode that is left out for being cut still counts in its group's baseline.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl.config import AlgoConfig
from agentrl.train.advantages import zero_variance_groups
from agentrl.types import Trajectory

__all__ = ["Selection", "select_episodes"]


@dataclass(frozen=True, slots=True)
class Selection:
    """The outcome: indices of the episodes that are trained, in order, and what decided it."""

    trained: tuple[int, ...]
    rewards_E: NDArray[np.float64]
    group_ids: tuple[str, ...]
    zero_variance: frozenset[str]

    @property
    def trained_groups(self) -> frozenset[str]:
        """The groups of which some episode is trained."""
        return frozenset(self.group_ids[i] for i in self.trained)

    def metrics(self) -> dict[str, float]:
        """Counts of groups and shares of episodes, by their names in the log."""
        groups = set(self.group_ids)
        episodes = max(len(self.group_ids), 1)
        return {
            "group/count": float(len(groups)),
            "group/zero_variance": float(len(self.zero_variance)),
            "group/trained": float(len(self.trained_groups)),
            "group/trained_episodes": float(len(self.trained)),
            "group/unscored_share": float(np.isnan(self.rewards_E).sum() / episodes),
        }


def select_episodes(trajectories: Sequence[Trajectory], algo: AlgoConfig) -> Selection:
    """Choose by reward, spread of the group's task scores, and truncation."""
    rewards_E = _floats(t.reward for t in trajectories)
    scores_E = _floats(t.reward if t.score is None else t.score for t in trajectories)
    # An episode without a reward is no part of its group, whatever its score.
    scores_E[np.isnan(rewards_E)] = math.nan
    group_ids = tuple(t.group_id for t in trajectories)
    equal = zero_variance_groups(scores_E, group_ids)
    dropped: frozenset[str] = frozenset()
    if algo.advantage.compares_groups and algo.advantage.drop_zero_variance:
        dropped = equal
    trained = tuple(
        index
        for index, trajectory in enumerate(trajectories)
        if trajectory.reward is not None
        and _has_drawn_tokens(trajectory)
        and trajectory.group_id not in dropped
        and not (algo.loss.mask_truncated and trajectory.truncated)
    )
    return Selection(trained, rewards_E, group_ids, equal)


def _has_drawn_tokens(trajectory: Trajectory) -> bool:
    """Whether any token was sampled other than greedily."""
    turns = (turn for sequence in trajectory.sequences for turn in sequence.turns)
    return any(turn.end > turn.start and turn.temperature > 0 for turn in turns)


def _floats(values: Iterable[float | None]) -> NDArray[np.float64]:
    return np.array([math.nan if x is None else x for x in values], dtype=np.float64)
