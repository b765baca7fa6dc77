"""Optional trackers of runs, each an extra: Weights & Biases and trackio."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentrl.config import Config
from agentrl.errors import DependencyError
from agentrl.settings import without_secrets
from agentrl.train.files import replace_text

__all__ = ["TrackioSink", "WandbSink"]


class WandbSink:
    """Logs to Weights & Biases; a resumed run goes on in the same W&B run.

    W&B ignores steps that it holds already: those that are run again after a resume.
    """

    def __init__(self, project: str, run_dir: Path, config: Config) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _absent("wandb") from error
        self._run = wandb.init(
            project=project,
            id=_tracker_id(run_dir),
            name=run_dir.name,
            dir=str(run_dir),
            config=without_secrets(config.model_dump(mode="json")),
            resume="allow",
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the numbers of one step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the upload."""
        self._run.finish()


class TrackioSink:
    """Logs to trackio; a resumed run goes on in the same trackio run, which keeps both values of a
    step that is run again."""

    def __init__(self, project: str, run_dir: Path, config: Config) -> None:
        try:
            import trackio
        except ImportError as error:
            raise _absent("trackio") from error
        self._run: Any = trackio.init(
            project=project,
            # trackio knows a run by its name alone, and another place may hold one named the same.
            name=f"{run_dir.name}-{_tracker_id(run_dir)}",
            config=without_secrets(config.model_dump(mode="json")),
            resume="allow",
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the numbers of one step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the upload."""
        self._run.finish()


def _tracker_id(run_dir: Path) -> str:
    """Name the run the same in every process that works on it: the id lies in the directory."""
    path = run_dir / "tracker_id"
    if not path.is_file():
        replace_text(path, uuid.uuid4().hex[:12])
    return path.read_text(encoding="utf-8")


def _absent(package: str) -> DependencyError:
    return DependencyError(
        f"log.{package} needs the package {package}: pip install 'agentrl[{package}]', or leave "
        f"log.{package} out"
    )
