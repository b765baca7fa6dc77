"""Runs that are killed again and again: no group is lost or trained on twice.

Every other step is saved, so that a kill costs up to two steps, which are run again.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import whole_runs

from agentrl.train.trajectories import read_trajectories

FAKE = Path(__file__).parents[1] / "engines" / "fake"
BATCH, MEMBERS = 4, 2
FLAGS = {
    0: (),
    1: (
        *("--engine.kind", "vllm", "--engine.transport", "gloo"),
        *("--engine.env", json.dumps({"PYTHONPATH": str(FAKE)})),
        *("--engine.extra", json.dumps({"token_seconds": 0.01})),
        *("--train.max_staleness", "1", "--algo.correction.kind", "tis"),
    ),
}
"""By `train.max_staleness`: the embedded engine, or a fake server that samples meanwhile."""
SIZES = [(3, 8), pytest.param(30, 20, marks=pytest.mark.slow)]
"""Kills, in a run of so many steps."""


def command(run_dir: Path, max_staleness: int, steps: int, *flags: str) -> list[str]:
    small = ("--rollout.batch_size", str(BATCH), "--rollout.n_samples_per_prompt", str(MEMBERS))
    return whole_runs.command(
        run_dir,
        *(*small, "--train.mini_batches", "1", "--train.max_steps", str(steps)),
        *(*FLAGS[max_staleness], *flags),
    )


def logged_steps(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def run_with_kills(run_dir: Path, max_staleness: int, kills: int, steps: int) -> None:
    """Start the run, SIGKILL it at `kills` moments, resume it each time, and let it end."""
    generator = random.Random(kills)
    flags: tuple[str, ...] = ()
    for step in sorted(generator.randrange(steps - 2) for _ in range(kills)):
        process = whole_runs.start(command(run_dir, max_staleness, steps, *flags))
        # Where it is already there, it is killed somewhere in its start, or soon after.
        longest = 3.0 if logged_steps(run_dir) >= step else 0.3
        while logged_steps(run_dir) < step:
            assert process.poll() is None, process.communicate()
            time.sleep(0.005)
        time.sleep(generator.uniform(0, longest))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        flags = ("--resume",) if (run_dir / "config.toml").exists() else ()
    status, _, err = whole_runs.run(command(run_dir, max_staleness, steps, *flags))
    assert status == 0, err


def assert_every_group_was_trained_on_once(run_dir: Path, steps: int) -> None:
    counts: Counter[str] = Counter()
    for step in range(1, steps + 1):
        rows = read_trajectories(run_dir / "trajectories" / f"{step:06d}.parquet")
        groups = {row.group_id for row in rows}
        assert len(groups) == BATCH
        counts.update(groups)
    assert counts == {f"{number:08d}": 1 for number in range(steps * BATCH)}


@pytest.mark.parametrize(("kills", "steps"), SIZES)
def test_a_synchronous_run_that_is_killed_ends_with_the_same_bits(
    tmp_path: Path, kills: int, steps: int
) -> None:
    run_with_kills(tmp_path / "run", 0, kills, steps)
    assert_every_group_was_trained_on_once(tmp_path / "run", steps)
    status, _, err = whole_runs.run(command(tmp_path / "uninterrupted", 0, steps))
    assert status == 0, err
    whole_runs.assert_same_run(tmp_path / "run", tmp_path / "uninterrupted")


@pytest.mark.parametrize(("kills", "steps"), SIZES)
def test_a_run_ahead_of_training_that_is_killed_loses_no_group_and_trains_none_twice(
    tmp_path: Path, kills: int, steps: int
) -> None:
    run_with_kills(tmp_path / "run", 1, kills, steps)
    assert_every_group_was_trained_on_once(tmp_path / "run", steps)
    ages = [line["staleness/max"] for line in whole_runs.metrics_of(tmp_path / "run")]
    assert max(ages) <= 1
