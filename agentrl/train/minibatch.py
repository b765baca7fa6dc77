"""Deals the samples of a batch out to optimizer steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from agentrl.config import Config
from agentrl.train.aggregation import token_weights
from agentrl.train.batch import Sample

__all__ = ["mini_batches"]


def mini_batches(
    samples: Sequence[Sample], config: Config, *, seed: tuple[int, int]
) -> Iterator[list[Sample]]:
    """Yield the samples of each optimizer step, weighted for it, over `ppo_epochs` passes.

    All sequences of an episode stay in one step. Episodes are shuffled by `seed` where a pass has
    several steps; where there are fewer episodes than steps, the empty steps are left out.
    """
    by_episode: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_episode[sample.episode].append(sample)
    episodes = list(by_episode.values())
    generator = np.random.default_rng(seed)
    for _ in range(config.train.ppo_epochs):
        order = list(range(len(episodes)))
        if config.train.mini_batches > 1:
            order = generator.permutation(len(episodes)).tolist()
        for part in np.array_split(order, config.train.mini_batches):
            if len(part):
                yield _weighted([episodes[i] for i in part], config.algo.loss.aggregation)


def _weighted(episodes: Sequence[Sequence[Sample]], aggregation: str) -> list[Sample]:
    lengths = [sum(sample.num_sampled for sample in episode) for episode in episodes]
    return [
        sample.with_fields(weights=np.full(sample.num_sampled, weight))
        for episode, weight in zip(episodes, token_weights(lengths, aggregation), strict=True)
        for sample in episode
    ]
