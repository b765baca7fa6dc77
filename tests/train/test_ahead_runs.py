"""Whole runs with rollouts ahead of training: what is trained, and how old it is."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import whole_runs

from agentrl.train.trajectories import read_trajectories

FAKE = Path(__file__).parents[1] / "engines" / "fake"
STEPS, BATCH, MEMBERS = 6, 4, 2


def arguments(run_dir: Path, max_staleness: int, *flags: str) -> list[str]:
    return whole_runs.command(
        run_dir,
        *("--engine.kind", "vllm", "--engine.transport", "gloo"),
        *("--engine.env", json.dumps({"PYTHONPATH": str(FAKE)})),
        *("--engine.extra", json.dumps({"token_seconds": 0.01})),
        *("--rollout.batch_size", str(BATCH), "--rollout.n_samples_per_prompt", str(MEMBERS)),
        *("--train.max_staleness", str(max_staleness), "--algo.correction.kind", "tis"),
        *("--train.mini_batches", "1", *flags),
    )


def trained_groups(run_dir: Path) -> list[list[str]]:
    """The groups of each step."""
    steps = []
    for step in range(1, STEPS + 1):
        rows = read_trajectories(run_dir / "trajectories" / f"{step:06d}.parquet")
        steps.append(sorted({row.group_id for row in rows}))
    return steps


def assert_nothing_is_lost(run_dir: Path, max_staleness: int) -> None:
    """Every group is in one step; at most those that ran ahead of the last steps are left out."""
    steps = trained_groups(run_dir)
    assert [len(groups) for groups in steps] == [BATCH] * STEPS
    counts = Counter(group for groups in steps for group in groups)
    assert counts == {f"{number:08d}": 1 for number in range(STEPS * BATCH)}
    ages = [line["staleness/max"] for line in whole_runs.metrics_of(run_dir)]
    assert max(ages) <= max_staleness


@pytest.mark.parametrize(
    ("max_staleness", "flags"),
    [
        (1, ()),
        (2, ()),
        pytest.param(1, ("--rollout.num_processes", "2"), marks=pytest.mark.slow),
    ],
)
def test_rollouts_run_ahead_within_the_bound_and_lose_nothing(
    tmp_path: Path, max_staleness: int, flags: tuple[str, ...]
) -> None:
    run_dir = tmp_path / "run"
    status, _, err = whole_runs.run(arguments(run_dir, max_staleness, *flags))
    assert status == 0, err
    assert_nothing_is_lost(run_dir, max_staleness)
    lines = whole_runs.metrics_of(run_dir)
    assert max(line["staleness/max"] for line in lines) > 0  # else nothing ran ahead
    assert lines[-1]["ahead/running_groups"] == lines[-1]["ahead/finished_groups"] == 0
