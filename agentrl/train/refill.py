"""Batches whose groups do not all count are made up for by further ones.

A group that too few members of were scored was dropped by the scheduler. Under dynamic sampling
(arXiv:2503.14476) a group counts when it teaches: the task's scores of its members differ, and not
all of it is masked. All rounds of a step sample from the same weights and draw what is missing, no
more, from the same cursor, so that no sampled group is thrown away and what a step samples does not
depend on timing. Groups without spread stay in the batch: they are logged, and selection leaves
them out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from agentrl.config import AlgoConfig, RolloutConfig
from agentrl.executors.groups import RolloutResult, batch_warnings
from agentrl.train.selection import select_episodes
from agentrl.types import StopReason

__all__ = ["count_filling", "merge_rollouts", "refill_warnings", "sample_until_full"]


async def sample_until_full(
    sample: Callable[[int], Awaitable[RolloutResult]], rollout: RolloutConfig, algo: AlgoConfig
) -> RolloutResult:
    """Sample until `batch_size` groups count, in at most 1 + `max_refills` rounds.

    Without dynamic sampling a round in which not a single group counts is the last one: more of the
    same would hardly be better.

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
        filling = count_filling(rounds[-1], rollout, algo)
        if filling == 0 and not rollout.dynamic_sampling:
            break
        missing -= filling
    return merge_rollouts(rounds, refill_warnings(missing, rollout))


def count_filling(result: RolloutResult, rollout: RolloutConfig, algo: AlgoConfig) -> int:
    """How many groups of `result` count towards the size of their batch."""
    if not rollout.dynamic_sampling:
        return len(result.groups)
    return len(select_episodes(result.trajectories, algo).trained_groups)


def refill_warnings(missing: int, rollout: RolloutConfig) -> dict[str, str]:
    """What to say of a batch whose refills ended with `missing` groups too few."""
    if missing <= 0:
        return {}
    full = f"{rollout.batch_size - missing} of {rollout.batch_size} groups"
    if rollout.dynamic_sampling:
        why = (
            "have a spread of scores: raise rollout.max_refills or rollout.n_samples_per_prompt, "
            "or choose examples that are neither always nor never solved"
        )
    else:
        why = (
            f"have {rollout.min_group_size} scored episodes (rollout.min_group_size): see why the "
            "others fail, or raise rollout.max_refills"
        )
    return {"refills": f"after at most {rollout.max_refills} refills only {full} {why}"}


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
