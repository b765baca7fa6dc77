"""Numbers of one batch of episodes, by the names they have in the log."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from agentrl.train.eval_result import EvalResult
from agentrl.train.metrics import EVAL_REWARD, REWARD
from agentrl.types import Trajectory

__all__ = ["engine_metrics", "episode_metrics", "eval_metrics"]

HELD_NOW = frozenset({"running_requests", "waiting_requests", "cache_bytes"})
"""What the embedded engine tells of itself at the moment it is asked."""


def episode_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Rewards, lengths, turns, ends and the agent's own metrics; means over episodes."""
    if not trajectories:
        return {}
    metrics: dict[str, float] = {}
    rewards = [t.reward for t in trajectories if t.reward is not None]
    if rewards:
        metrics |= {
            REWARD: float(np.mean(rewards)),
            "reward/std": float(np.std(rewards)),
            "reward/min": min(rewards),
            "reward/max": max(rewards),
        }
    scores = [t.score for t in trajectories if t.score is not None]
    if scores:
        metrics["reward/score_mean"] = float(np.mean(scores))
    sampled = [t.num_sampled for t in trajectories]
    metrics |= {
        "length/response_mean": float(np.mean(sampled)),
        "length/response_max": float(max(sampled)),
        "length/total_mean": float(np.mean([sum(map(len, t.sequences)) for t in trajectories])),
        "length/turns_mean": float(np.mean([t.num_turns for t in trajectories])),
        "length/truncated": float(np.mean([t.truncated for t in trajectories])),
    }
    ends = Counter(t.stop_reason for t in trajectories)
    metrics |= {f"stop/{reason}": count / len(trajectories) for reason, count in ends.items()}
    for name in ("queue", "engine", "env"):
        seconds = [getattr(t.timings, name) for t in trajectories]
        metrics[f"episode/{name}_seconds"] = float(np.mean(seconds))
    return metrics | _own_metrics(trajectories)


def eval_metrics(result: EvalResult) -> dict[str, float]:
    """An evaluation in the log; what could not be scored is left out."""
    metrics = {
        EVAL_REWARD: result.reward_mean,
        "eval/reward_stderr": result.reward_stderr,
        "eval/unscored": float(result.unscored),
        "eval/turns_mean": result.turns_mean,
        "eval/sampled_tokens_mean": result.sampled_tokens_mean,
    }
    metrics |= {f"eval/pass@{k}": share for k, share in result.pass_at_k.items()}
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def engine_metrics(stats: Mapping[str, float]) -> dict[str, float]:
    """What an engine counted, by its names in the log.

    What it holds at the moment is left out: between two steps that is nothing.
    """
    return {f"engine/{name}": float(stats[name]) for name in stats if name not in HELD_NOW}


def _own_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The mean of every metric that the agent gave, over the episodes that gave it."""
    values: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            values[name].append(value)
    return {f"agent/{name}": float(np.mean(given)) for name, given in values.items()}
