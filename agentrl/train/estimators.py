"""Advantage estimators by name: from rewards of episodes to advantages of tokens.

Shapes: E episodes, R sampled tokens of one episode. To add an estimator write a function of the
type `Estimator` and enter it in `ESTIMATORS`; `algo.advantage.estimator` names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from agentrl.config import AdvantageConfig
from agentrl.train.advantages import generalized_advantages, group_normalized_advantages, whiten

__all__ = ["ESTIMATORS", "EpisodeRewards", "Estimate", "Estimator"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class EpisodeRewards:
    """All episodes of a batch, in float64.

    rewards[E], NaN where not scorable; group_ids, E names; token_rewards, E arrays [R]; values, E
    arrays [R], or None without a value head. An episode that is not trained has arrays of length
    0: it counts in baselines and gets no gradient.
    """

    rewards_E: Floats
    group_ids: Sequence[str]
    token_rewards: Sequence[Floats]
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
    tokens = rewards.token_rewards
    return Estimate([np.full(len(r), a) for r, a in zip(tokens, advantages_E, strict=True)])


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


ESTIMATORS: Mapping[str, Estimator] = {"grpo": grpo, "gae": gae}
