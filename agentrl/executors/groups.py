"""What goes into the rollout scheduler and what comes out: groups of episodes of one example.

A group is known by its id. Nothing here depends on the order in which episodes ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field

from agentrl.types import Example, StopReason, Trajectory

__all__ = ["GroupRequest", "RolloutGroup", "RolloutResult", "batch_warnings", "spread_warning"]


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """One example to be sampled `n_samples` times. `group_id` is unique in a run."""

    group_id: str
    example_id: str
    example: Example
    n_samples: int

    def rollout_ids(self) -> list[str]:
        """The ids of the members: unique in a run, and sorting in the order of the members."""
        width = max(3, len(str(self.n_samples - 1)))
        return [f"{self.group_id}-{member:0{width}d}" for member in range(self.n_samples)]


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The completed episodes of one example, sorted by rollout_id; failed members are left out."""

    group_id: str
    example_id: str
    trajectories: tuple[Trajectory, ...] = field(repr=False)

    @property
    def rewards(self) -> tuple[float, ...]:
        """The rewards of the scored members."""
        return tuple(t.reward for t in self.trajectories if t.reward is not None)

    @property
    def scores(self) -> tuple[float, ...]:
        """The task's scores of the scored members, which decide whether the group has spread."""
        scored = (t for t in self.trajectories if t.reward is not None)
        return tuple(t.reward if t.score is None else t.score for t in scored)  # type: ignore[misc]


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """What one call of the scheduler gave.

    Attributes:
        groups: those with enough scored members, in the order of the requests.
        outcomes: the last attempt of every member of every request, sorted by rollout_id; those
            of dropped groups and of members that failed are among them.
        dropped: those outcomes that never completed.
        num_completed: episodes that ended by themselves; failed attempts do not count.
        num_failed: failed attempts, by how they failed.
        num_retried: attempts beyond the first of a member.
        num_dropped_groups: groups with too few scored members.
        seconds: wall time.
        warnings: what a user should know about this batch: a sentence by its kind.
    """

    # Not in the repr: it would take seconds, and asyncio prints a task's result when it restores
    # the signal handlers.
    groups: tuple[RolloutGroup, ...] = field(repr=False)
    outcomes: tuple[Trajectory, ...] = field(repr=False)
    dropped: tuple[Trajectory, ...] = field(repr=False)
    num_completed: int
    num_failed: Mapping[StopReason, int]
    num_retried: int
    num_dropped_groups: int
    seconds: float
    warnings: Mapping[str, str] = field(default_factory=dict)

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """All episodes of all groups, to train on."""
        return tuple(t for group in self.groups for t in group.trajectories)

    def metrics(self) -> dict[str, float]:
        """The counters, by the names they have in the log."""
        failed = {f"rollout/failed_{kind}": float(n) for kind, n in self.num_failed.items()}
        return {
            "rollout/completed": float(self.num_completed),
            "rollout/failed": float(sum(self.num_failed.values())),
            "rollout/retried": float(self.num_retried),
            "rollout/dropped_members": float(len(self.dropped)),
            "rollout/dropped_groups": float(self.num_dropped_groups),
            "rollout/seconds": self.seconds,
            **failed,
        }


def batch_warnings(
    groups: SequenceABC[RolloutGroup], dropped: SequenceABC[Trajectory]
) -> dict[str, str]:
    """What is suspicious about a batch as a whole: a sentence by its kind."""
    warnings = {}
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if trajectories and all(_last_turn_cut(trajectory) for trajectory in trajectories):
        warnings["all_cut"] = (
            "every episode ended in an answer that was cut by the token limit: raise "
            "rollout.max_new_tokens (or rollout.max_tokens)"
        )
    if dropped:
        first = dropped[0]
        reason = (first.error or first.stop_reason).strip().splitlines()[-1]
        warnings["dropped"] = (
            f"{len(dropped)} episodes failed every attempt and were dropped; the first, "
            f"{first.rollout_id}: {reason}"
        )
    return warnings


def spread_warning(groups: SequenceABC[RolloutGroup]) -> str | None:
    """Why an estimator that compares the members of a group learns nothing from all of these."""
    compared = [group for group in groups if len(group.scores) > 1]
    if not compared or any(min(group.scores) != max(group.scores) for group in compared):
        return None
    if any(min(group.rewards) != max(group.rewards) for group in compared):
        return (
            "no group has any spread of scores, although rewards differ, so a group estimator "
            "learns nothing from this batch: give no score where the reward is the task's measure"
        )
    return (
        "no group has any spread of rewards, so this batch teaches nothing: check the reward, the "
        "difficulty of the examples and rollout.temperature"
    )


def _last_turn_cut(trajectory: Trajectory) -> bool:
    turns = trajectory.sequences[-1].turns if trajectory.sequences else ()
    return bool(turns) and turns[-1].finish_reason == "length"
