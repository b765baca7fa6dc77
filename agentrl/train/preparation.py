"""Fills in what samples need before the first optimizer step of an update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.config import AlgoConfig, Config, KLConfig
from agentrl.errors import UsageError
from agentrl.train.batch import Sample, episode_token_rewards, join_episodes, split_episodes
from agentrl.train.estimators import ESTIMATORS, EpisodeRewards
from agentrl.train.learner import Learner
from agentrl.train.losses import KL_ESTIMATORS
from agentrl.train.selection import Selection
from agentrl.train.shaping import turn_lengths, turn_sums
from agentrl.train.worker import SampleScores
from agentrl.types import Trajectory

__all__ = ["estimate_advantages", "kl_of_samples", "score_samples"]

_NO_TURNS = np.empty(0, dtype=np.int64)


def score_samples(
    learner: Learner, samples: list[Sample], config: Config
) -> tuple[list[Sample], list[SampleScores] | None]:
    """Fill in old log-probabilities, values and reference log-probabilities.

    The first optimizer step runs on unchanged weights and is its own denominator, so that an
    update of one step needs no pass of the policy before it, nor does one whose denominator the
    sampler reported. The scores are None where none was made.

    Raises:
        UsageError: `algo.loss.old_logprobs` is `sampler`, or `algo.correction` is asked for, but
            some samples have no log-probabilities of the engine.
    """
    algo, train = config.algo, config.train
    _check_sampler_logprobs(samples, algo)
    by_sampler = algo.loss.old_logprobs == "sampler"
    has_values = algo.advantage.estimator == "gae"
    several_steps = train.ppo_epochs * train.mini_batches > 1
    scores = None
    if has_values or ((several_steps or algo.kl.in_reward) and not by_sampler):
        scores = learner.score(samples)
        samples = _with(samples, "old_logprobs", [score.logprobs for score in scores])
    if has_values and scores is not None:
        samples = _with(samples, "old_values", [score.values for score in scores])
    if by_sampler:
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
    received = [episode_token_rewards(trajectory) for trajectory in trajectories]
    rewards_E = selection.rewards_E
    if algo.kl.in_reward:
        penalties = join_episodes(kl_of_samples(samples, algo.kl), samples, len(trajectories))
        received = [r - p if len(p) else r for r, p in zip(received, penalties, strict=True)]
        rewards_E = rewards_E - np.array([penalty_R.sum() for penalty_R in penalties])
    lengths = [turn_lengths(t) if t.reward is not None else _NO_TURNS for t in trajectories]
    rewards = EpisodeRewards(
        rewards_E,
        selection.group_ids,
        token_rewards=[
            received_R if episode in trained else np.empty(0)
            for episode, received_R in enumerate(received)
        ],
        turn_rewards=[turn_sums(*pair) for pair in zip(received, lengths, strict=True)],
        turn_lengths=lengths,
    )
    values = [sample.old_values for sample in samples if sample.old_values is not None]
    if values:
        rewards = replace(rewards, values=join_episodes(values, samples, len(trajectories)))
    estimate = ESTIMATORS[algo.advantage.estimator](rewards, algo.advantage)
    samples = _with(samples, "advantages", split_episodes(estimate.advantages, samples))
    if estimate.returns is not None:
        samples = _with(samples, "returns", split_episodes(estimate.returns, samples))
    return samples


def kl_of_samples(samples: Sequence[Sample], kl: KLConfig) -> list[NDArray[np.float64]]:
    """`kl.coef` times the estimated KL to the reference at each token: what a reward loses.

    The policy is the one before the update (arXiv:2203.02155). One [R] for each sample.
    """
    penalties = []
    for sample in samples:
        assert sample.old_logprobs is not None, "score_samples fills them in for kl.in_reward"
        assert sample.reference_logprobs is not None, "score_samples fills them in for kl.coef > 0"
        policy_R = torch.from_numpy(sample.old_logprobs).double()
        reference_R = torch.from_numpy(sample.reference_logprobs).double()
        penalties.append(kl.coef * KL_ESTIMATORS[kl.estimator](policy_R, reference_R).numpy())
    return penalties


def _check_sampler_logprobs(samples: Sequence[Sample], algo: AlgoConfig) -> None:
    if all(sample.sampler_logprobs is not None for sample in samples):
        return
    for flag, value, remedy in (
        ("algo.loss.old_logprobs", algo.loss.old_logprobs, "learner"),
        ("algo.correction.kind", algo.correction.kind, "none"),
    ):
        if value not in ("learner", "none"):
            raise UsageError(
                f"{flag} is {value} but some turns have no log-probabilities of the engine, since "
                "the agent sampled them with logprobs false: leave that to rollout.logprobs, or "
                f"set {flag} {remedy}"
            )


def _with(samples: Sequence[Sample], field: str, arrays: Iterable[Any]) -> list[Sample]:
    return [s.with_fields(**{field: array}) for s, array in zip(samples, arrays, strict=True)]
