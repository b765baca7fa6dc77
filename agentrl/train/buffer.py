"""Groups that were finished ahead of training, in a checkpoint: exact, so that none is lost.

ahead/000012.parquet   their episodes (see `trajectories`), in the checkpoint of step 12
ahead/groups.json      their order, when each began, and the counts of its sampling
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.errors import UsageError
from agentrl.executors.groups import RolloutGroup, RolloutResult, batch_warnings
from agentrl.train.trajectories import read_trajectories, trajectory_file, write_trajectories
from agentrl.types import StopReason, Trajectory

__all__ = ["FinishedGroup", "load_finished", "save_finished"]


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """What was sampled of one group; `version` is that of the weights under which it began."""

    group_id: str
    version: int
    result: RolloutResult = field(repr=False)


def save_finished(folder: Path, step: int, groups: Sequence[FinishedGroup]) -> None:
    """Write `groups`, in their order, into the checkpoint `folder` of `step`.

    Raises:
        SaveError, OSError: they could not be written.
    """
    place = folder / "ahead"
    outcomes = [trajectory for group in groups for trajectory in group.result.outcomes]
    write_trajectories(place, step, outcomes)
    described = [
        {
            "group_id": group.group_id,
            "version": group.version,
            "is_usable": bool(group.result.groups),
            "num_failed": dict(group.result.num_failed),
            "num_retried": group.result.num_retried,
            "seconds": group.result.seconds,
        }
        for group in groups
    ]
    (place / "groups.json").write_text(json.dumps(described), encoding="utf-8")


def load_finished(folder: Path, step: int) -> list[FinishedGroup]:
    """Read what `save_finished` wrote; nothing where the checkpoint has none.

    Raises:
        UsageError: the files are broken.
    """
    place = folder / "ahead"
    if not place.is_dir():
        return []
    try:
        described = json.loads((place / "groups.json").read_text(encoding="utf-8"))
        outcomes: defaultdict[str, list[Trajectory]] = defaultdict(list)
        for trajectory in read_trajectories(trajectory_file(place, step)):
            outcomes[trajectory.group_id].append(trajectory)
        return [_finished(each, tuple(outcomes[each["group_id"]])) for each in described]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"the checkpoint {folder} cannot be read ({error}): remove it to resume from the one "
            "before"
        ) from error


def _finished(described: Mapping[str, Any], outcomes: tuple[Trajectory, ...]) -> FinishedGroup:
    """Put a group together as the scheduler did."""
    group_id = described["group_id"]
    completed = tuple(t for t in outcomes if not t.stop_reason.failed)
    dropped = tuple(t for t in outcomes if t.stop_reason.failed)
    groups: tuple[RolloutGroup, ...] = ()
    if described["is_usable"]:
        groups = (RolloutGroup(group_id, outcomes[0].example_id, completed),)
    result = RolloutResult(
        groups=groups,
        outcomes=outcomes,
        dropped=dropped,
        num_completed=len(completed),
        num_failed={StopReason(kind): n for kind, n in described["num_failed"].items()},
        num_retried=described["num_retried"],
        num_dropped_groups=0 if groups else 1,
        seconds=described["seconds"],
        warnings=batch_warnings(groups, dropped),
    )
    return FinishedGroup(group_id, described["version"], result)
