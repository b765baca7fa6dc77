"""Fills in what samples need before the first optimizer step of an update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from agentrl.config import AlgoConfig, Config
from agentrl.errors import UsageError
from agentrl.train.batch import Sample, episode_token_rewards, join_episodes, split_episodes
from agentrl.train.estimators import ESTIMATORS, EpisodeRewards
from agentrl.train.learner import Learner
from agentrl.train.selection import Selection
from agentrl.train.worker import SampleScores
from agentrl.types import Trajectory

__all__ = ["estimate_advantages", "score_samples"]


def score_samples(
    learner: Learner, samples: list[Sample], config: Config
) -> tuple[list[Sample], list[SampleScores] | None]:
    """Fill in old log-probabilities, values and reference log-probabilities.

    The first optimizer step runs on unchanged weights and is its own denominator, so that an
    update of one step needs no pass of the policy before it, nor does one whose denominator the
    sampler reported. The scores are None where none was made.

    Raises:
        UsageError: `algo.loss.old_logprobs` is `sampler` but the engine reported none.
    """
    algo, train = config.algo, config.train
    by_sampler = algo.loss.old_logprobs == "sampler"
    has_values = algo.advantage.estimator == "gae"
    scores = None
    if has_values or (train.ppo_epochs * train.mini_batches > 1 and not by_sampler):
        scores = learner.score(samples)
        samples = _with(samples, "old_logprobs", [score.logprobs for score in scores])
    if has_values and scores is not None:
        samples = _with(samples, "old_values", [score.values for score in scores])
    if by_sampler:
        if any(sample.sampler_logprobs is None for sample in samples):
            raise UsageError(
                "algo.loss.old_logprobs is sampler but the engine reported no log-probabilities: "
                "set algo.loss.old_logprobs learner."
            )
        samples = _with(samples, "old_logprobs", [s.sampler_logprobs for s in samples])
    if algo.kl.coef > 0:
        samples = _with(samples, "reference_logprobs", learner.reference_logprobs(samples))
    return samples, scores


def estimate_advantages(
    samples: list[Sample],
    trajectories: Sequence[Trajectory],
    selection: Selection,
    algo: AlgoConfig,
) -> list[Sample]:
    """Fill in advantages and, where there are values, returns.

    Args:
        samples: those of the episodes that `selection` trains.
        trajectories: the whole batch; the others count in the baselines.
        selection: what `select_episodes` said of them.
        algo: names the estimator and holds its settings.
    """
    trained = set(selection.trained)
    rewards = EpisodeRewards(
        selection.rewards_E,
        selection.group_ids,
        [
            episode_token_rewards(trajectory) if episode in trained else np.empty(0)
            for episode, trajectory in enumerate(trajectories)
        ],
    )
    values = [sample.old_values for sample in samples if sample.old_values is not None]
    if values:
        rewards = replace(rewards, values=join_episodes(values, samples, len(trajectories)))
    estimate = ESTIMATORS[algo.advantage.estimator](rewards, algo.advantage)
    samples = _with(samples, "advantages", split_episodes(estimate.advantages, samples))
    if estimate.returns is not None:
        samples = _with(samples, "returns", split_episodes(estimate.returns, samples))
    return samples


def _with(samples: Sequence[Sample], field: str, arrays: Iterable[Any]) -> list[Sample]:
    return [s.with_fields(**{field: array}) for s, array in zip(samples, arrays, strict=True)]
