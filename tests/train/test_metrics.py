"""Metrics: exact on disk, in every sink, and cut back on resume."""

from __future__ import annotations

import io
import json
import logging
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from agentrl.config import Config
from agentrl.errors import DependencyError
from agentrl.train.metrics import MetricWriter, open_metrics
from agentrl.train.metrics_file import cut_metrics, format_line, read_metrics
from agentrl.train.progress import Progress, sparkline
from agentrl.train.rundir import RunDir


def config_for(path: Path, **log: object) -> Config:
    return Config.model_validate({"agent": "a.py", "log": {"run_dir": path, **log}})


def write(config: Config, steps: dict[int, dict[str, float]]) -> Path:
    with RunDir.create(config) as run, open_metrics(run, config) as metrics:
        for step, values in steps.items():
            metrics.log(step, values)
        return run.path


def test_floats_come_back_bit_for_bit(tmp_path: Path) -> None:
    values = {"a": 0.1 + 0.2, "b": 1e-300, "c": np.float32(0.1), "d": 3, "e": -0.0}
    write(config_for(tmp_path / "r", tensorboard=False), {1: values})
    (row,) = read_metrics(tmp_path / "r" / "metrics.jsonl")
    assert row == {"step": 1, **{name: float(value) for name, value in values.items()}}
    assert math.copysign(1, row["e"]) == -1


def test_a_line_is_on_disk_when_log_returns(tmp_path: Path) -> None:
    config = config_for(tmp_path / "r", tensorboard=False)
    with RunDir.create(config) as run, open_metrics(run, config) as metrics:
        metrics.log(1, {"a": 1.0})
        assert run.metrics_file.read_text() == '{"step": 1, "a": 1.0}\n'


def test_what_is_not_finite_is_valid_json_and_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        path = write(
            config_for(tmp_path / "r", tensorboard=False),
            {4: {"loss": math.nan, "kl": math.inf, "ok": 1.0}},
        )
    line = (path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail) == {
        "step": 4,
        "loss": None,
        "kl": None,
        "ok": 1.0,
    }
    assert math.isnan(read_metrics(path / "metrics.jsonl")[0]["kl"])
    assert "step 4: not a finite number: kl, loss" in caplog.text


def test_a_metric_cannot_take_the_place_of_the_step() -> None:
    with pytest.raises(ValueError, match="cannot be called 'step'"):
        format_line(1, {"step": 2.0})


def test_a_line_that_a_crash_cut_short_is_not_a_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1.0}\n{"step": 2, "a"')
    assert [row["step"] for row in read_metrics(path)] == [1]
    cut_metrics(path, 5)
    assert path.read_text() == '{"step": 1, "a": 1.0}\n'


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    config = config_for(tmp_path / "r")
    write(config, {step: {"reward/mean": float(step)} for step in (1, 2, 3)})
    with RunDir.resume(config, 1) as run, open_metrics(run, config, first_step=2) as metrics:
        metrics.log(2, {"reward/mean": 20.0})
    events = EventAccumulator(str(tmp_path / "r" / "tensorboard"))
    events.Reload()
    shown = [(scalar.step, scalar.value) for scalar in events.Scalars("reward/mean")]
    assert shown == [(1, 1.0), (2, 20.0)]


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_an_absent_tracker_names_its_extra(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)
    config = config_for(tmp_path / "r", tensorboard=False, **{tracker: "project"})
    with (
        RunDir.create(config) as run,
        pytest.raises(DependencyError, match=rf"pip install 'agentrl\[{tracker}\]'"),
    ):
        open_metrics(run, config)


def test_every_sink_gets_every_step() -> None:
    class Sink:
        def __init__(self) -> None:
            self.seen: list[object] = []

        def log(self, step: int, metrics: object) -> None:
            self.seen.append((step, metrics))

        def close(self) -> None:
            self.seen.append("closed")

    sinks = [Sink(), Sink()]
    with MetricWriter(sinks) as writer:
        writer.log(1, {"a": 1.0})
    assert [sink.seen for sink in sinks] == [[(1, {"a": 1.0}), "closed"]] * 2


def test_without_a_terminal_a_step_is_one_plain_line() -> None:
    out = io.StringIO()
    with Progress(3, out=out) as progress:
        progress.rollouts_wanted(2)
        with progress.phase("rollout"):
            progress.rollout_advanced(tokens=10)
        progress.step_done(
            1, {"reward/mean": 0.5, "throughput/tokens_per_second": 1234.5, "time/rollout": 2.0}
        )
    assert out.getvalue() == "step 1/3  reward 0.5000  1,234 tok/s  rollout 2.00s\n"


def test_a_terminal_shows_rollouts_speed_phase_and_reward() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    with Progress(3, out=out) as progress:
        progress.step_done(1, {"reward/mean": 0.25, "time/update": 1.5})
        progress.rollouts_wanted(8)
        with progress.phase("rollout"):
            progress.rollout_advanced(5, tokens=100)
            progress._live.refresh()  # type: ignore[union-attr]
    shown = out.getvalue()
    for words in ("1 of 3", "5 of 8", "tok/s", "now: rollout", "update 1.50s", "0.250"):
        assert words in shown


def test_phases_add_up_and_begin_anew_with_every_step() -> None:
    progress = Progress(1, out=io.StringIO())
    for _ in range(2):
        with progress.phase("update"), progress.phase("save"):
            pass
    assert list(progress.phase_seconds()) == ["time/save", "time/update"]
    progress.step_done(1, {})
    assert progress.phase_seconds() == {}


@pytest.mark.parametrize("error", [BrokenPipeError(), ValueError("I/O on closed file")])
def test_progress_falls_silent_when_nobody_can_read_it(error: Exception) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    with Progress(2, out=Gone()) as progress:
        progress.step_done(1, {"reward/mean": 1.0})
        progress.note("saved")


def test_a_sparkline_keeps_a_place_for_what_is_not_finite() -> None:
    assert sparkline([0.0, 1.0, math.nan, 0.5]) == "▁█ ▅"
    assert sparkline([2.0, 2.0]) == "▁▁"
