"""What the loop itself must remember across a restart, beside the learner's own state."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentrl.errors import UsageError

__all__ = ["LoopState"]

_FILE = "loop.json"


@dataclass(slots=True)
class LoopState:
    """Counts up to the last finished step. `step` is also the version of the weights.

    `rewards` are the mean rewards of the steps that had one. `cursor` is where the data is drawn
    from next; groups that were sampled ahead and are in no batch yet are drawn again.
    """

    step: int = 0
    tokens_sampled: int = 0
    tokens_trained: int = 0
    train_seconds: float = 0.0
    rewards: list[float] = field(default_factory=list)
    cursor: Mapping[str, Any] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        """Write it into a checkpoint folder; raises OSError."""
        (folder / _FILE).write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> LoopState:
        """Read it from a checkpoint folder.

        Raises:
            UsageError: the file is missing or broken.
        """
        path = folder / _FILE
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(
                f"the checkpoint {folder} cannot be read ({error}): remove it to resume from the "
                "one before"
            ) from error
