"""One policy update: from a batch of trajectories to new weights and the numbers of it.

It runs on rank 0 and depends on the trajectories, the configuration and the learner's state only:
the same batch gives the same weights. Old log-probabilities, reference and values are taken once,
before the first optimizer step; then come `ppo_epochs` passes of `mini_batches` optimizer steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from agentrl.config import AlgoConfig, Config
from agentrl.train.batch import Sample, build_samples
from agentrl.train.learner import Learner
from agentrl.train.minibatch import mini_batches
from agentrl.train.mismatch import sample_mismatch
from agentrl.train.objective import means
from agentrl.train.optimizer import lr_scale
from agentrl.train.preparation import estimate_advantages, score_samples
from agentrl.train.selection import select_episodes
from agentrl.train.shaping import shape_rewards
from agentrl.train.stale import oldest_trained
from agentrl.train.worker import SampleScores
from agentrl.types import Trajectory

__all__ = ["policy_update"]


def policy_update(
    learner: Learner, trajectories: Sequence[Trajectory], config: Config, *, step: int = 0
) -> dict[str, float]:
    """Train the learner on one batch, `step` training steps after the first.

    When no episode is left to train on, nothing changes: the optimizer makes no step, and
    `policy/skipped_updates` is 1.

    Returns:
        Metrics by their names in the log: of the losses (means over the optimizer steps), the
        groups, the advantages, and the mismatch between sampler and learner.

    Raises:
        UsageError: sampler log-probabilities are needed but the engine reported none.
        TrainingError: a gradient was not finite.
    """
    trajectories, metrics = shape_rewards(trajectories, config.rollout)
    selection = select_episodes(trajectories, config.algo)
    oldest = oldest_trained(step, config.train)
    samples = build_samples(trajectories, selection.trained, oldest=oldest)
    metrics |= selection.metrics()
    metrics["policy/tokens_trained"] = float(sum(sample.num_trained for sample in samples))
    metrics["policy/skipped_updates"] = float(not samples)
    if not samples:
        return metrics
    samples, scores = score_samples(learner, samples, config)
    samples = estimate_advantages(samples, trajectories, selection, config.algo)
    metrics |= _advantage_metrics(samples)
    if scores is not None:
        metrics |= _mismatch(samples, scores)
    steps: list[dict[str, float]] = []
    seed = (config.train.seed, learner.optimizer_steps)
    began = time.perf_counter()
    batches = list(mini_batches(samples, config, group_ids=selection.group_ids, seed=seed))
    for index, chosen in enumerate(batches):
        scale = lr_scale(step + index / len(batches), config.train)
        step_metrics, step_scores = _optimizer_step(learner, chosen, config.algo, scale)
        if scores is None and not steps:  # the first step's are of the weights that sampled
            metrics |= _mismatch(chosen, step_scores)
        steps.append(step_metrics)
    metrics |= _work_metrics(steps, time.perf_counter() - began, learner.peak_flops)
    for name in steps[0]:
        full_name = name if "/" in name else f"policy/{name}"
        metrics[full_name] = float(np.mean([step[name] for step in steps]))
    metrics["policy/optimizer_steps"] = float(len(steps))
    return metrics


def _optimizer_step(
    learner: Learner, samples: Sequence[Sample], algo: AlgoConfig, scale: float
) -> tuple[dict[str, float], list[SampleScores]]:
    sums, scores = learner.forward_backward(samples, algo)
    outcome = learner.step(scale)
    metrics = {**means(sums), "grad_norm": outcome.grad_norm, "lr": outcome.lr}
    if outcome.value_grad_norm is not None:
        metrics["value/grad_norm"] = outcome.value_grad_norm
    return metrics, scores


def _work_metrics(
    steps: Sequence[dict[str, float]], seconds: float, peak: float | None
) -> dict[str, float]:
    """The work of all optimizer steps, taken out of `steps`: tokens as given and as computed, how
    often each computed one was used, how fast that was; and where the cards' peak is known, which
    share of it was used (model FLOPs utilisation, see `train.flops`)."""
    given = sum(step.pop("tokens_given") for step in steps)
    computed = sum(step.pop("tokens_computed") for step in steps)
    flops = sum(step.pop("flops") for step in steps)
    metrics = {
        "train/tokens_given": given,
        "train/tokens_computed": computed,
        "train/sharing": given / computed,
        "train/tokens_per_second": computed / seconds,
        "train/tflops": flops / seconds / 1e12,
    }
    if peak is not None:
        metrics["train/mfu"] = flops / seconds / peak
    return metrics


def _advantage_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    advantages_N = _concatenate(samples, "advantages")
    metrics = {
        "advantage/mean": float(advantages_N.mean()),
        "advantage/std": float(advantages_N.std()),
    }
    if samples[0].returns is not None:
        returns_N, values_N = _concatenate(samples, "returns"), _concatenate(samples, "old_values")
        metrics["return/mean"] = float(returns_N.mean())
        metrics["value/mean"] = float(values_N.mean())
        variance = np.var(returns_N)
        if variance > 0:
            unexplained = np.var(returns_N - values_N) / variance
            metrics["value/explained_variance"] = float(1.0 - unexplained)
    return metrics


def _mismatch(samples: Sequence[Sample], scores: Sequence[SampleScores]) -> dict[str, float]:
    return sample_mismatch(samples, [score.logprobs for score in scores])


def _concatenate(samples: Sequence[Sample], field: str) -> np.ndarray:
    return np.concatenate([getattr(sample, field) for sample in samples])
