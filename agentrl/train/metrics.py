"""Where the numbers of a run go: metrics.jsonl always; TensorBoard, W&B and trackio on request.

Names are `group/name`: `reward/mean`, `reward/std`, `policy/kl`, `policy/entropy`,
`length/response_mean`, `time/rollout` (seconds), `throughput/tokens_per_second`, and the same
under `eval/` for an evaluation, `eval/reward_mean`. The report draws one chart for each.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from agentrl.config import Config
from agentrl.errors import SaveError
from agentrl.train.metrics_file import format_line
from agentrl.train.rundir import RunDir
from agentrl.train.trackers import TrackioSink, WandbSink

__all__ = ["EVAL_REWARD", "REWARD", "MetricSink", "MetricWriter", "open_metrics"]

REWARD = "reward/mean"
"""The metric that curve.png and the progress line show."""

EVAL_REWARD = "eval/reward_mean"
"""The same of an evaluation."""

_log = logging.getLogger(__name__)


class MetricSink(Protocol):
    """One place that takes the numbers of a step."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the numbers of one step."""

    def close(self) -> None:
        """Write what is still held back."""


class MetricWriter:
    """Gives the numbers of each step to every sink; warns of those that are not finite."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = list(sinks)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the numbers of one step, once, when the step is done."""
        broken = [name for name, value in metrics.items() if not math.isfinite(value)]
        if broken:
            _log.warning("step %d: not a finite number: %s", step, ", ".join(sorted(broken)))
        for sink in self._sinks:
            sink.log(step, metrics)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_metrics(run: RunDir, config: Config, *, first_step: int = 1) -> MetricWriter:
    """Open the sinks that `config.log` asks for.

    `first_step` is the step that is logged next; after a resume, TensorBoard hides what it holds
    from there on.

    Raises:
        DependencyError: a tracker is asked for whose package is not installed.
    """
    sinks: list[MetricSink] = [JsonLinesSink(run.metrics_file)]
    if config.log.tensorboard:
        sinks.append(TensorBoardSink(run.tensorboard, first_step=first_step))
    if config.log.wandb:
        sinks.append(WandbSink(config.log.wandb, run.path, config))
    if config.log.trackio:
        sinks.append(TrackioSink(config.log.trackio, run.path, config))
    return MetricWriter(sinks)


class JsonLinesSink:
    """Appends to metrics.jsonl; a line is on its way to disk before `log` returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line.

        Raises:
            SaveError: the disk is full or gone.
        """
        try:
            self._file.write(format_line(step, metrics))
            self._file.flush()
        except OSError as error:
            raise SaveError(
                f"could not write {self._path}: {error.strerror}; make room, then go on with "
                "--resume"
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardSink:
    """Writes scalars for TensorBoard."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = first_step if first_step > 1 else None
        self._writer = SummaryWriter(str(folder), purge_step=purge, flush_secs=10)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add every number as a scalar."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush the event file."""
        self._writer.close()
