"""Deals the samples of a batch out to optimizer steps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from agentrl.config import Config, LossConfig, RolloutConfig
from agentrl.train.aggregation import token_weights
from agentrl.train.batch import Sample

__all__ = ["loss_scale_factor", "mini_batches"]


def mini_batches(
    samples: Sequence[Sample],
    config: Config,
    *,
    group_ids: Sequence[str],
    seed: tuple[int, int],
) -> Iterator[list[Sample]]:
    """Yield the samples of each optimizer step, weighted for it, over `ppo_epochs` passes.

    All sequences of an episode stay in one step. What `train.shuffle` names is shuffled by `seed`
    where a pass has several steps; with `groups` (`group_ids`, by episode), the episodes of a group
    stay together as far as steps of equal size allow. A whole batch makes `mini_batches` steps; one
    from which episodes were dropped makes fewer of the same size, since Adam's step is no smaller
    for a gradient of few episodes.
    """
    by_episode: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_episode[sample.episode].append(sample)
    together = config.train.shuffle == "groups"
    by_group: dict[str, list[list[Sample]]] = defaultdict(list)
    for episode, parts in by_episode.items():
        by_group[group_ids[episode] if together else str(episode)].append(parts)
    groups = list(by_group.values())
    generator = np.random.default_rng(seed)
    rollout, most_steps = config.rollout, config.train.mini_batches
    size = math.ceil(rollout.batch_size * rollout.n_samples_per_prompt / most_steps)
    num_steps = min(math.ceil(len(by_episode) / size), most_steps)
    scale_factor = loss_scale_factor(config.algo.loss, config.rollout)
    for _ in range(config.train.ppo_epochs):
        order = list(range(len(groups)))
        if most_steps > 1:
            order = generator.permutation(len(groups)).tolist()
        episodes = [episode for group in order for episode in groups[group]]
        for part in np.array_split(range(len(episodes)), num_steps):
            chosen = [episodes[i] for i in part]
            yield _weighted(chosen, config.algo.loss.aggregation, scale_factor)


def loss_scale_factor(loss: LossConfig, rollout: RolloutConfig) -> int:
    """The constant length of `seq-mean-token-sum-norm`: as set, or the most an episode samples."""
    most = min(rollout.max_tokens, rollout.max_turns * rollout.max_new_tokens)
    return loss.loss_scale_factor or most


def _weighted(
    episodes: Sequence[Sequence[Sample]], aggregation: str, scale_factor: int
) -> list[Sample]:
    lengths = [sum(sample.num_trained for sample in episode) for episode in episodes]
    weights = token_weights(lengths, aggregation, scale_factor=scale_factor)
    return [
        sample.with_fields(weights=np.where(sample.trains, weight, 0.0))
        for episode, weight in zip(episodes, weights, strict=True)
        for sample in episode
    ]
