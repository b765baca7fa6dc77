"""What an evaluation found: pure functions from trajectories to mean, error and pass@k.

Episodes that broke (reward None) count in `unscored` and `stop_reasons`, never in a mean.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from agentrl.types import Trajectory

__all__ = ["EvalResult", "pass_at_k", "summarize"]

PASS_SCORE = 1.0
"""A sample solves its example when its score reaches this (scores lie in 0 to 1)."""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """One evaluation. NaN where nothing could be scored."""

    reward_mean: float
    """Mean over examples of the mean reward of an example's samples."""
    reward_stderr: float
    """Standard error of that mean, clustered by example (arXiv:2411.00640, section 2.2)."""
    pass_at_k: Mapping[int, float]
    """k -> share of examples solved by at least one of k samples, where k samples exist."""
    stop_reasons: Mapping[str, int]
    """Stop reason -> episodes, the commonest first."""
    examples: int
    episodes: int
    unscored: int
    turns_mean: float
    sampled_tokens_mean: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the engine counted, and its mismatch with the policy, by their names in the log."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: NaN becomes None."""
        return {name: _plain(value) for name, value in asdict(self).items()}


def summarize(trajectories: Sequence[Trajectory]) -> EvalResult:
    """Summarize the episodes of one evaluation; samples of one example share `group_id`."""
    rewards: dict[str, list[float]] = defaultdict(list)
    scores: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.reward is None:
            continue
        rewards[trajectory.group_id].append(trajectory.reward)
        score = trajectory.reward if trajectory.score is None else trajectory.score
        scores[trajectory.group_id].append(score)
    means = [_mean(group) for group in rewards.values()]
    stop_reasons = Counter(str(trajectory.stop_reason) for trajectory in trajectories)
    return EvalResult(
        reward_mean=_mean(means),
        reward_stderr=_standard_error(means),
        pass_at_k=pass_at_k(scores.values()),
        stop_reasons=dict(stop_reasons.most_common()),
        examples=len({trajectory.group_id for trajectory in trajectories}),
        episodes=len(trajectories),
        unscored=sum(trajectory.reward is None for trajectory in trajectories),
        turns_mean=_mean([trajectory.num_turns for trajectory in trajectories]),
        sampled_tokens_mean=_mean([trajectory.num_sampled for trajectory in trajectories]),
    )


def pass_at_k(groups: Iterable[Sequence[float]]) -> dict[int, float]:
    """Estimate pass@k without bias, `1 - C(n - c, k) / C(n, k)` (arXiv:2107.03374, equation 1).

    `groups` are the scores of each example's samples. k runs over the powers of two and the
    largest group's size; examples with fewer than k samples have no part in pass@k.
    """
    counts = [(len(group), sum(score >= PASS_SCORE for score in group)) for group in groups]
    largest = max((samples for samples, _ in counts), default=0)
    ks = sorted({*(2**power for power in range(largest.bit_length())), largest} - {0})
    return {
        k: _mean([1 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts if n >= k])
        for k in ks
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _standard_error(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.nan
    mean = _mean(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(variance / len(values))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
