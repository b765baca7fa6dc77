"""Advantage estimators by name: from rewards of episodes to advantages of tokens.

Shapes: E episodes, R sampled tokens and K turns of one episode. To add an estimator write a
function of the type `Estimator` and enter it in `ESTIMATORS`; `algo.advantage.estimator` names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from agentrl.config import AdvantageConfig
from agentrl.train.advantages import (
    generalized_advantages,
    group_normalized_advantages,
    leave_one_out_advantages,
    reward_to_go,
    turn_level_advantages,
    whiten,
)

__all__ = ["ESTIMATORS", "EpisodeRewards", "Estimate", "Estimator"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class EpisodeRewards:
    """All episodes of a batch, in float64.

    rewards[E], NaN where not scorable; group_ids, E names; token_rewards, E arrays [R]; values, E
    arrays [R], or None without a value head. An episode that is not trained has arrays of length
    0: it counts in baselines and gets no gradient. turn_rewards and turn_lengths, E arrays [K] of
    all scorable episodes, trained or not: what each turn received, and its sampled tokens.
    """

    rewards_E: Floats
    group_ids: Sequence[str]
    token_rewards: Sequence[Floats]
    turn_rewards: Sequence[Floats]
    turn_lengths: Sequence[NDArray[np.int64]]
    values: Sequence[Floats] | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """Advantages, E arrays [R]; returns, E arrays [R] for the value head, if it is trained."""

    advantages: Sequence[Floats]
    returns: Sequence[Floats] | None = None


Estimator: TypeAlias = Callable[[EpisodeRewards, AdvantageConfig], Estimate]


def grpo(rewards: EpisodeRewards, config: AdvantageConfig) -> Estimate:
    """Every token of an episode has the episode's group-normalised advantage."""
    advantages_E = group_normalized_advantages(
        rewards.rewards_E, rewards.group_ids, normalize_std=config.normalize_std
    )
    return Estimate(_on_all_tokens(advantages_E, rewards))


def dr_grpo(rewards: EpisodeRewards, config: AdvantageConfig) -> Estimate:
    """Every token has the episode's difference from its group's mean (arXiv:2503.20783)."""
    return Estimate(_on_all_tokens(_centered(rewards), rewards))


def rloo(rewards: EpisodeRewards, config: AdvantageConfig) -> Estimate:
    """Every token has the episode's difference from the mean of the others of its group."""
    advantages_E = leave_one_out_advantages(rewards.rewards_E, rewards.group_ids)
    return Estimate(_on_all_tokens(advantages_E, rewards))


def reinforce_plus_plus(rewards: EpisodeRewards, config: AdvantageConfig) -> Estimate:
    """Discounted rewards to come of each token, whitened (arXiv:2501.03262)."""
    returns = [reward_to_go(r, gamma=config.gamma) for r in rewards.token_rewards]
    return Estimate(whiten(returns) if config.whiten else returns)


def reinforce_plus_plus_baseline(rewards: EpisodeRewards, config: AdvantageConfig) -> Estimate:
    """Differences from the group's mean, whitened over all tokens (arXiv:2501.03262)."""
    advantages = _on_all_tokens(_centered(rewards), rewards)
    return Estimate(whiten(advantages) if config.whiten else advantages)


def turn_level(rewards: EpisodeRewards, config: AdvantageConfig) -> Estimate:
    """Every token of a turn has the turn's advantage over the same turn of the group."""
    by_turn = turn_level_advantages(
        rewards.turn_rewards,
        rewards.group_ids,
        gamma=config.gamma,
        normalize_std=config.normalize_std,
    )
    return Estimate(
        [
            np.repeat(advantages_K, lengths_K) if len(tokens_R) else np.empty(0)
            for advantages_K, lengths_K, tokens_R in zip(
                by_turn, rewards.turn_lengths, rewards.token_rewards, strict=True
            )
        ]
    )


def gae(rewards: EpisodeRewards, config: AdvantageConfig) -> Estimate:
    """Generalized advantages over each episode's own tokens, whitened if wanted."""
    assert rewards.values is not None, "gae is configured together with its value head"
    pairs = [
        generalized_advantages(r, v, gamma=config.gamma, lam=config.lam)
        for r, v in zip(rewards.token_rewards, rewards.values, strict=True)
    ]
    advantages = [advantage for advantage, _ in pairs]
    return Estimate(
        whiten(advantages) if config.whiten else advantages,
        [returns for _, returns in pairs],
    )


ESTIMATORS: Mapping[str, Estimator] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "turn_level": turn_level,
    "gae": gae,
}


def _centered(rewards: EpisodeRewards) -> Floats:
    return group_normalized_advantages(rewards.rewards_E, rewards.group_ids, normalize_std=False)


def _on_all_tokens(advantages_E: Floats, rewards: EpisodeRewards) -> list[Floats]:
    """The episode's number on each of its trained tokens."""
    return [
        np.full(len(tokens_R), advantage)
        for tokens_R, advantage in zip(rewards.token_rewards, advantages_E, strict=True)
    ]
