"""Advantages: pure functions on arrays, in float64.

Shapes: E episodes, R tokens that the policy sampled in one episode (environment tokens are not
among them), K turns of one episode, N tokens of a whole batch. A reward of NaN means not scorable.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "generalized_advantages",
    "group_normalized_advantages",
    "leave_one_out_advantages",
    "reward_to_go",
    "turn_level_advantages",
    "whiten",
    "zero_variance_groups",
]

Floats = NDArray[np.float64]


def group_normalized_advantages(
    rewards: ArrayLike,
    group_ids: Sequence[str],
    *,
    normalize_std: bool = True,
    epsilon: float = 1e-6,
) -> Floats:
    """Compare each episode with the others of its group (GRPO, arXiv:2402.03300, section 4.1.2).

    A = (r - mean(group)) / (std(group) + epsilon), with the sample standard deviation (n - 1).
    Groups may have any size and any order. A group whose rewards are all equal, or that has one
    scored member, gives exactly 0.

    Args:
        rewards: [E]; NaN where not scorable: no part of a baseline, advantage 0.
        group_ids: E names.
        normalize_std: without it the difference from the mean is not divided (arXiv:2503.20783).

    Returns:
        Advantages [E].
    """
    rewards_E = np.asarray(rewards, dtype=np.float64)
    advantages_E = np.zeros_like(rewards_E)
    for members in _members_of_groups(group_ids):
        scored = members[~np.isnan(rewards_E[members])]
        if _all_equal(rewards_E[scored]):
            continue
        centered = rewards_E[scored] - rewards_E[scored].mean()
        scale = rewards_E[scored].std(ddof=1) + epsilon if normalize_std else 1.0
        advantages_E[scored] = centered / scale
    return advantages_E


def leave_one_out_advantages(rewards: ArrayLike, group_ids: Sequence[str]) -> Floats:
    """Compare each episode with the mean of the others of its group (RLOO, arXiv:2402.14740).

    A = r - mean(others), an unbiased baseline since no episode is part of its own. A group with one
    scored member gives exactly 0.

    Args:
        rewards: [E]; NaN where not scorable: no part of a baseline, advantage 0.
        group_ids: E names.

    Returns:
        Advantages [E].
    """
    rewards_E = np.asarray(rewards, dtype=np.float64)
    advantages_E = group_normalized_advantages(rewards_E, group_ids, normalize_std=False)
    for members in _members_of_groups(group_ids):
        scored = members[~np.isnan(rewards_E[members])]
        # r - (sum - r) / (n - 1) = n / (n - 1) * (r - mean)
        advantages_E[scored] *= len(scored) / max(len(scored) - 1, 1)
    return advantages_E


def turn_level_advantages(
    turn_rewards: Sequence[Floats],
    group_ids: Sequence[str],
    *,
    gamma: float,
    normalize_std: bool = True,
) -> list[Floats]:
    """Give each turn its own credit: its discounted rewards to come, against its siblings' turn.

    G[k] = r[k] + gamma * G[k + 1] over the turns of an episode, a turn being the action (ArCHer,
    arXiv:2402.19446); what was received before a turn is none of its merit. G[k] is then compared
    with the same turn k of the group's other episodes (as turn-level rewards in MT-GRPO,
    arXiv:2505.11821): a baseline that does not depend on what turn k did, so that it adds no bias;
    an episode that had ended before turn k is no part of it. A turn that no sibling reached gives
    exactly 0.

    Args:
        turn_rewards: E arrays [K]; K may differ and may be 0 (an episode that cannot be scored).
        group_ids: E names.
        gamma: discount per turn.
        normalize_std: divide by the standard deviation of turn k in the group.

    Returns:
        E arrays [K].
    """
    returns = [reward_to_go(rewards_K, gamma=gamma) for rewards_K in turn_rewards]
    names = [
        f"{k}/{group_id}"
        for returns_K, group_id in zip(returns, group_ids, strict=True)
        for k in range(len(returns_K))
    ]
    if not names:
        return returns
    advantages = group_normalized_advantages(
        np.concatenate(returns), names, normalize_std=normalize_std
    )
    return np.split(advantages, np.cumsum([len(returns_K) for returns_K in returns])[:-1])


def zero_variance_groups(scores: ArrayLike, group_ids: Sequence[str]) -> frozenset[str]:
    """Name the groups whose scored members all have the same score.

    Give it the task's score, not the shaped reward: shaping separates episodes that all failed.

    Args:
        scores: [E]; NaN where not scorable.
        group_ids: E names.
    """
    scores_E = np.asarray(scores, dtype=np.float64)
    return frozenset(
        group_ids[members[0]]
        for members in _members_of_groups(group_ids)
        if _all_equal(scores_E[members][~np.isnan(scores_E[members])])
    )


def generalized_advantages(
    rewards: ArrayLike, values: ArrayLike, *, gamma: float, lam: float
) -> tuple[Floats, Floats]:
    """Estimate advantages over the policy's own tokens (GAE, arXiv:1506.02438, equation 16).

    The successor of a token is the next token that the policy sampled: what the environment said
    between is part of the transition. The value after the last token is 0.

    Args:
        rewards: [R]; what was received after each token, before the next.
        values: [R]; of the state in which each token was sampled.
        gamma: discount per own token.
        lam: 0 is the one-step estimate, 1 the discounted return less the value.

    Returns:
        Advantages [R], returns [R] (advantage plus value: what the value head is trained on).
    """
    rewards_R = np.asarray(rewards, dtype=np.float64)
    values_R = np.asarray(values, dtype=np.float64)
    successors_R = np.append(values_R[1:], 0.0) if len(values_R) else values_R
    deltas_R = rewards_R + gamma * successors_R - values_R
    advantages_R = reward_to_go(deltas_R, gamma=gamma * lam)
    return advantages_R, advantages_R + values_R


def reward_to_go(rewards: ArrayLike, *, gamma: float) -> Floats:
    """Discounted sum from each position to the end: G[t] = r[t] + gamma * G[t + 1]. [R] -> [R]."""
    rewards_R = np.asarray(rewards, dtype=np.float64)
    sums_R = np.empty_like(rewards_R)
    running = 0.0
    for t in range(len(rewards_R) - 1, -1, -1):
        running = rewards_R[t] + gamma * running
        sums_R[t] = running
    return sums_R


def whiten(arrays: Sequence[Floats], *, epsilon: float = 1e-8) -> list[Floats]:
    """Shift and scale all tokens of a batch together to mean 0 and standard deviation 1.

    Args:
        arrays: one [R] for each episode; R may differ and may be 0.
    """
    if not sum(map(len, arrays)):
        return list(arrays)
    values_N = np.concatenate(arrays)
    mean, scale = values_N.mean(), values_N.std() + epsilon
    return [(array - mean) / scale for array in arrays]


def _members_of_groups(group_ids: Sequence[str]) -> list[NDArray[np.intp]]:
    """Positions of each group's members, groups in order of first appearance."""
    positions: dict[str, list[int]] = {}
    for position, group_id in enumerate(group_ids):
        positions.setdefault(group_id, []).append(position)
    return [np.array(members) for members in positions.values()]


def _all_equal(values: Floats) -> bool:
    # Compared, not measured: the standard deviation of equal numbers can round to more than 0.
    return len(values) == 0 or bool(values.min() == values.max())
