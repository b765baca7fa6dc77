"""Whole runs with rollouts ahead of training: what is trained, and how old it is."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
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


SLOW_AGENT = '''
"""Every member of the first group waits after its first guess until three steps were made."""

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, {agents!r})

from number_guess import NumberGuess

METRICS = Path({metrics!r})


class Waits(NumberGuess):
    async def reset(self, example):
        self.waits = example["waits"]
        return await super().reset(example)

    async def step(self, action):
        while self.waits and not (METRICS.exists() and METRICS.read_text().count("\\n") >= 3):
            await asyncio.sleep(0.02)
        self.waits = False
        return await super().step(action)


def examples(split):
    # Six is never guessed: every episode has all its turns.
    return [{{"target": 6, "waits": n == 0}} for n in range(200)]
'''


def stale_run(folder: Path, stale: str) -> list[dict[str, float]]:
    """The metrics of a run in which one group is older than `train.max_staleness` allows."""
    run_dir, agent = folder / "run", folder / "waits.py"
    agents = str(whole_runs.AGENT.parent)
    agent.write_text(SLOW_AGENT.format(agents=agents, metrics=str(run_dir / "metrics.jsonl")))
    flags = ("--agent", str(agent), "--data.shuffle", "false", "--train.stale", stale)
    flags += ("--algo.advantage.drop_zero_variance", "false")
    status, _, err = whole_runs.run(arguments(run_dir, 1, *flags))
    assert status == 0, err
    return whole_runs.metrics_of(run_dir)


def versions_of(folder: Path, step: int) -> list[tuple[str, np.ndarray]]:
    """The group of each episode of a step, and the version of each of its sampled tokens."""
    rows = read_trajectories(folder / "run" / "trajectories" / f"{step:06d}.parquet")
    return [
        (row.group_id, np.concatenate([s.weight_versions[s.response_mask] for s in row.sequences]))
        for row in rows
    ]


@pytest.mark.slow
@pytest.mark.parametrize("stale", ["drop", "mask", "keep"])
def test_a_group_that_took_too_long_is_treated_as_the_run_is_told(
    tmp_path: Path, stale: str
) -> None:
    lines = stale_run(tmp_path, stale)
    waited = [
        (step, versions.min())
        for step in range(1, STEPS + 1)
        for group_id, versions in versions_of(tmp_path, step)
        if group_id == f"{0:08d}"
    ]
    step = waited[0][0]
    assert step >= 4  # three versions or more had passed
    assert waited == [(step, 0)] * MEMBERS
    at = lines[step - 1]
    assert at["group/count"] == BATCH  # one that is left out is replaced
    assert at.get("staleness/dropped_episodes") == (MEMBERS if stale == "drop" else None)
    share = {"mask": "masked", "keep": "kept"}.get(stale)
    assert all((f"staleness/{name}_share" in at) == (name == share) for name in ("masked", "kept"))
    # `staleness/max` is that of the batch, in which masked tokens are too.
    assert (at["staleness/max"] > 1) == (stale != "drop")
    sampled = np.concatenate([versions for _, versions in versions_of(tmp_path, step)])
    fresh = int((sampled >= step - 1 - 1).sum())
    assert fresh < len(sampled)
    assert at["policy/tokens_trained"] == (len(sampled) if stale == "keep" else fresh)
