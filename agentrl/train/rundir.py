"""The run directory: where everything that a run leaves behind lies.

    config.toml                 the resolved configuration; `--config` reads it back
    metrics.jsonl               one line a step
    trajectories/000012.parquet every finished episode of step 12 (see train/trajectories.py)
    tensorboard/  checkpoints/  model/ (the final Hugging Face folder)
    adapter/                    under LoRA: its factors alone, as peft and vLLM load them
    summary.json  report.html  curve.png

One process at a time holds a run directory: a lock on `.lock` that ends with the process. Only
rank 0 opens it; other ranks get its path.
"""

from __future__ import annotations

import fcntl
import json
import os
import tomllib
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agentrl.config import Config
from agentrl.errors import UsageError
from agentrl.settings import to_toml
from agentrl.train.episode_log import clear_unfinished
from agentrl.train.files import replace_text
from agentrl.train.metrics_file import cut_metrics, read_metrics
from agentrl.train.trajectories import cut_trajectories

__all__ = ["RunDir", "newest_run", "write_summary"]

RUNS = Path("runs")
_LOCK = ".lock"


class RunDir:
    """A run directory that this process holds; the lock goes with `close`."""

    def __init__(self, path: Path) -> None:
        """Take hold of `path`, making it when it is not there. Use `create` or `resume`.

        Raises:
            UsageError: it cannot be made, or another process holds it.
        """
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UsageError(
                f"cannot use the run directory {path}: {error.strerror}; "
                "name another one with --log.run_dir"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(self._lock, 32).decode() or "unknown"
            self.close()
            raise UsageError(
                f"the run directory {path} is in use by process {holder}: wait until it ends, or "
                "name another one with --log.run_dir"
            ) from error
        os.ftruncate(self._lock, 0)
        os.write(self._lock, str(os.getpid()).encode())

    @classmethod
    def create(cls, config: Config) -> Self:
        """Begin a new run in `log.run_dir`, or else in `runs/<agent>-<date>-<time>`.

        A run that failed there before it finished a step is taken over.

        Raises:
            UsageError: the directory holds something already, is in use or cannot be made.
        """
        run = cls(config.log.run_dir or _dated_path(config.agent))
        if run._failed_at_start():
            run._cut(0)
        elif any(entry.name != _LOCK for entry in run.path.iterdir()):
            run.close()
            raise UsageError(
                f"the run directory {run.path} is not empty: go on with that run by --resume "
                f"{run.path}, or name another one with --log.run_dir"
            )
        replace_text(run.config_file, to_toml(config))
        return run

    @classmethod
    def resume(cls, config: Config, step: int) -> Self:
        """Take up the run in `log.run_dir` after `step` finished steps (0: from the beginning).

        What was logged of later steps is cut off: they will run again.

        Raises:
            UsageError: no `log.run_dir`, nothing in it, or it is in use; or what is saved would
                mean other weights under `config`.
        """
        path = config.log.run_dir
        if path is None or not (path / "config.toml").is_file():
            raise UsageError(
                f"nothing to resume in {path}: name the directory of a run, --resume RUN_DIR"
            )
        run = cls(path)
        try:
            if step:
                run._refuse_other_scaling(config)
        except UsageError:
            run.close()
            raise
        run._cut(step)
        replace_text(run.config_file, to_toml(config))
        return run

    def _refuse_other_scaling(self, config: Config) -> None:
        """Raise `UsageError` where the saved factors of LoRA would be added in another measure."""
        written = tomllib.loads(self.config_file.read_text(encoding="utf-8"))
        alpha = written.get("model", {}).get("lora", {}).get("alpha", config.model.lora.alpha)
        if alpha != config.model.lora.alpha:
            raise UsageError(
                f"the run in {self.path} was trained with model.lora.alpha {alpha:g}, and with "
                f"{config.model.lora.alpha:g} its weights would be others: set it to {alpha:g}"
            )

    def _failed_at_start(self) -> bool:
        """True where a run began of which nothing is finished."""
        steps = any(row["step"] for row in read_metrics(self.metrics_file))
        finished = steps or self.model.exists()
        saved = self.checkpoints.is_dir() and any(self.checkpoints.iterdir())
        return self.config_file.is_file() and not finished and not saved

    def _cut(self, step: int) -> None:
        """Remove what was logged after `step`; before the first one, its evaluation too."""
        last_step = step or -1
        cut_metrics(self.metrics_file, last_step)
        cut_trajectories(self.trajectories, last_step)
        clear_unfinished(self.trajectories)

    @property
    def config_file(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.toml"

    @property
    def metrics_file(self) -> Path:
        """One JSON object a line, one line a step."""
        return self.path / "metrics.jsonl"

    @property
    def trajectories(self) -> Path:
        """The folder of finished episodes."""
        return self.path / "trajectories"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """The final model, a Hugging Face folder."""
        return self.path / "model"

    @property
    def adapter(self) -> Path:
        """The final factors of LoRA, a folder that peft loads."""
        return self.path / "adapter"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.path / "tensorboard"

    def close(self) -> None:
        """Let go of the directory. Safe to call twice."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def newest_run(agent: Path) -> Path:
    """Find the newest `runs/<agent>-<date>-<time>` that holds a configuration.

    Raises:
        UsageError: there is none.
    """
    dated = f"{agent.stem}-[0-9]*-[0-9]*/config.toml"
    found = sorted(RUNS.glob(dated), key=lambda file: file.parent.name)
    if not found:
        raise UsageError(
            f"nothing to resume: no {RUNS}/{agent.stem}-<date>-<time> here; give the directory of "
            "the run, --resume RUN_DIR"
        )
    return found[-1].parent


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> Path:
    """Write `summary.json` into a run directory and return its path; values must fit JSON.

    Raises:
        SaveError: the file could not be written.
    """
    path = run_dir / "summary.json"
    replace_text(path, json.dumps(dict(summary), indent=2, allow_nan=False) + "\n")
    return path


def _dated_path(agent: Path) -> Path:
    """Name a directory that is not there yet: two runs may begin within one second."""
    name = f"{agent.stem}-{datetime.now():%Y%m%d-%H%M%S}"
    path, count = RUNS / name, 1
    while path.exists():
        count += 1
        path = RUNS / f"{name}-{count}"
    return path
