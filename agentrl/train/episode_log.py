"""Episodes on disk soon after they ended, before the step that they belong to is done.

    trajectories/unfinished/000001.parquet    rows as in the file of a step, `step` left empty

Where a step takes longer than `EVERY`, what ended meanwhile is written in parts, so that a run that
hangs or is killed can be analysed. A part is removed when all its episodes are in files of steps;
until then an episode may be in both. A run that is resumed samples them again, and begins anew.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Iterable
from pathlib import Path

from agentrl.errors import SaveError
from agentrl.train.trajectories import write_rows
from agentrl.types import Trajectory

__all__ = ["EpisodeLog", "clear_unfinished"]

logger = logging.getLogger(__name__)

EVERY = 5.0
"""Seconds after its end by which an episode is on disk."""

_FOLDER = "unfinished"


class EpisodeLog:
    """Writes the episodes of one run in parts. Used on an event loop.

    Args:
        trajectories: the folder of the steps' files.
    """

    def __init__(self, trajectories: Path) -> None:
        self._folder = trajectories / _FOLDER
        self._pending: dict[str, Trajectory] = {}
        self._parts: dict[Path, set[str]] = {}
        """Files, and their episodes that are in no step's file yet."""
        self._timer: asyncio.TimerHandle | None = None
        self._num_parts = 0

    def add(self, trajectory: Trajectory) -> None:
        """Take an episode that has just ended."""
        self._pending[trajectory.rollout_id] = trajectory
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(EVERY, self.flush)

    def settle(self, trajectories: Iterable[Trajectory]) -> None:
        """Forget episodes that are in the file of a step now, and the parts that held only such."""
        settled = {trajectory.rollout_id for trajectory in trajectories}
        for rollout_id in settled & self._pending.keys():
            del self._pending[rollout_id]
        for path, held in list(self._parts.items()):
            held -= settled
            if not held:
                path.unlink(missing_ok=True)
                del self._parts[path]
        if not self._pending:
            self._stop_timer()

    def flush(self) -> None:
        """Write what is held back; what cannot be written is kept for the next time."""
        self._stop_timer()
        if not self._pending:
            return
        path = self._folder / f"{self._num_parts + 1:06d}.parquet"
        try:
            write_rows(path, None, list(self._pending.values()))
        except SaveError as error:
            logger.warning("episodes wait to be written: %s", error)
            return
        self._num_parts += 1
        self._parts[path] = set(self._pending)
        self._pending.clear()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def clear_unfinished(trajectories: Path) -> None:
    """Remove the parts that an earlier process left: their episodes are sampled again."""
    shutil.rmtree(trajectories / _FOLDER, ignore_errors=True)
