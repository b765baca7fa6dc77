"""Dynamic sampling: groups that teach nothing are made up for by further ones (arXiv:2503.14476).

A group teaches when it is trained on: the task's scores of its members differ, and not all of it is
masked. All rounds of a step sample from the same weights and draw what is missing, no more, from
the same cursor, so that no sampled group is thrown away and what a step samples does not depend on
timing. Groups without spread stay in the batch: they are logged, and selection leaves them out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from agentrl.config import AlgoConfig, RolloutConfig
from agentrl.executors.groups import RolloutResult, batch_warnings
from agentrl.train.selection import select_episodes
from agentrl.types import StopReason

__all__ = ["merge_rollouts", "refill_warnings", "sample_until_spread"]


async def sample_until_spread(
    sample: Callable[[int], Awaitable[RolloutResult]], rollout: RolloutConfig, algo: AlgoConfig
) -> RolloutResult:
    """Sample until `batch_size` groups can be trained on, in at most 1 + `max_refills` rounds.

    Args:
        sample: samples so many new groups.
        rollout: batch size and limit.
        algo: decides which groups are trained on.

    Returns:
        All rounds as one; with a warning when the limit came first.
    """
    rounds: list[RolloutResult] = []
    missing = rollout.batch_size
    while missing > 0 and len(rounds) <= rollout.max_refills:
        rounds.append(await sample(missing))
        missing -= len(select_episodes(rounds[-1].trajectories, algo).trained_groups)
    return merge_rollouts(rounds, refill_warnings(missing, rollout))


def refill_warnings(missing: int, rollout: RolloutConfig) -> dict[str, str]:
    """What to say of a batch whose refills ended with `missing` groups too few."""
    if missing <= 0 or not rollout.dynamic_sampling:
        return {}
    return {
        "refills": f"after {rollout.max_refills} refills only {rollout.batch_size - missing} of "
        f"{rollout.batch_size} groups have a spread of scores: raise rollout.max_refills or "
        "rollout.n_samples_per_prompt, or choose examples that are neither always nor never "
        "solved"
    }


def merge_rollouts(
    rounds: Sequence[RolloutResult], warnings: dict[str, str] | None = None
) -> RolloutResult:
    """Put rounds, in the order in which they were drawn, together as if they had been one.

    Args:
        rounds: results with distinct group ids.
        warnings: added to those of the whole.
    """
    groups = tuple(group for each in rounds for group in each.groups)
    dropped = tuple(trajectory for each in rounds for trajectory in each.dropped)
    failed: Counter[StopReason] = Counter()
    for each in rounds:
        failed.update(each.num_failed)
    return RolloutResult(
        groups=groups,
        outcomes=tuple(trajectory for each in rounds for trajectory in each.outcomes),
        dropped=dropped,
        num_completed=sum(each.num_completed for each in rounds),
        num_failed=dict(sorted(failed.items())),
        num_retried=sum(each.num_retried for each in rounds),
        num_dropped_groups=sum(each.num_dropped_groups for each in rounds),
        seconds=sum(each.seconds for each in rounds),
        warnings=batch_warnings(groups, dropped) | (warnings or {}),
    )
