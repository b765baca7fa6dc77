"""Changes to rewards before advantages are made of them. The task's score stays as it was.

Shapes: R sampled tokens, K turns of one episode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from agentrl.config import RolloutConfig
from agentrl.types import Trajectory

__all__ = ["overlong_penalty", "shape_rewards", "turn_lengths", "turn_sums"]


def overlong_penalty(room: int, buffer: int, factor: float) -> float:
    """Punish an answer softly for coming near its limit (DAPO, arXiv:2503.14476, equation 13).

    0 up to `buffer` tokens before the limit, from there linearly down to -`factor` at the limit.

    Args:
        room: tokens that were left.
        buffer: length of the slope in tokens, at least 1.
        factor: most of the penalty.
    """
    return factor * min(0.0, (max(room, 0) - buffer) / buffer)


def shape_rewards(
    trajectories: Sequence[Trajectory], rollout: RolloutConfig
) -> tuple[list[Trajectory], dict[str, float]]:
    """Add the penalty of `rollout.overlong_buffer` to the rewards of scored episodes.

    The room of an episode is what its longest turn left of `rollout.max_new_tokens` or its longest
    sequence of `rollout.max_tokens`, whichever is less. The penalty is received after the last
    token. An episode without a score of its own keeps its reward as the score, so that groups are
    judged by the task alone.

    Returns:
        The episodes in the same order, and metrics of the penalty (empty without a buffer).
    """
    buffer = rollout.overlong_buffer
    if buffer.len == 0:
        return list(trajectories), {}
    shaped, penalties = [], []
    for trajectory in trajectories:
        if trajectory.reward is None:
            shaped.append(trajectory)
            continue
        penalty = overlong_penalty(_room(trajectory, rollout), buffer.len, buffer.penalty_factor)
        penalties.append(penalty)
        score = trajectory.reward if trajectory.score is None else trajectory.score
        shaped.append(replace(trajectory, reward=trajectory.reward + penalty, score=score))
    if not penalties:
        return shaped, {}
    return shaped, {
        "reward/overlong_penalty_mean": float(np.mean(penalties)),
        "reward/overlong_share": float(np.mean(np.array(penalties) < 0)),
    }


def turn_lengths(trajectory: Trajectory) -> NDArray[np.int64]:
    """Sampled tokens of each turn that has any, in the order of `episode_token_rewards`. [K]."""
    return np.array(
        [
            turn.end - turn.start
            for sequence in trajectory.sequences
            for turn in sorted(sequence.turns, key=lambda turn: turn.start)
            if turn.end > turn.start
        ],
        dtype=np.int64,
    )


def turn_sums(
    token_values_R: NDArray[np.float64], lengths_K: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Add up the tokens of each turn: [R] and lengths [K], all positive and R in sum, to [K]."""
    if len(lengths_K) == 0:
        return np.empty(0)
    starts_K = np.append(0, np.cumsum(lengths_K)[:-1])
    return np.add.reduceat(token_values_R, starts_K)


def _room(trajectory: Trajectory, rollout: RolloutConfig) -> int:
    """Tokens that were left before the episode would have been cut."""
    longest_turn = max(turn_lengths(trajectory), default=0)
    longest = max(map(len, trajectory.sequences), default=0)
    return min(rollout.max_new_tokens - int(longest_turn), rollout.max_tokens - longest)
