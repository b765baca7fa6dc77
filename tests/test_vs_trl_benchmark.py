"""What the benchmarks against TRL count and time, and how they end what they start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import vs_trl_task

    return vs_trl_task


@pytest.fixture
def side(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import vs_trl_side

    return vs_trl_side


def test_a_step_is_told_when_its_last_response_is_scored(
    task: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"prompt": 3, "response": 4, "groups": 1, "members": 2, "scored": "even ids"}
    run = task.Task(task.Workload(**sizes))
    assert run.score("abcd", [2, 4, 6, 7]) == 0.75
    assert capsys.readouterr().out == ""
    assert run.score("abcd", [1, 3, 5, 8]) == 0.25
    assert run.score("abcd", [0, 2, 4, 6]) == 1.0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line.removeprefix(task.MARK))["reward"] for line in lines] == [0.5]


def test_digits_are_counted_in_the_text(task: ModuleType) -> None:
    run = task.Task(task.Workload(response=4))
    assert run.score("1a2b", [5, 6, 7, 8]) == 0.5
    with pytest.raises(ValueError, match="a response of 3 tokens, where each is to have 4"):
        run.score("123", [5, 6, 7])


def test_prompts_are_the_same_for_whoever_asks(task: ModuleType) -> None:
    first, second = (task.Task(task.Workload(prompt=20)).examples("train") for _ in range(2))
    assert first == second
    assert {len(example["prompt"]) for example in first} == {20}


def test_the_first_whole_step_does_not_count(side: ModuleType) -> None:
    found = side.Side()
    walls, rewards = (10.0, 40.0, 43.0, 47.0), (0.1, 0.2, 0.3, 0.6)
    found.add([side.Step(wall, wall / 2, r) for wall, r in zip(walls, rewards, strict=True)])
    assert (found.wall, found.cpu) == ([3.0, 4.0], [1.5, 2.0])
    assert found.first_rewards == [0.1]
    assert found.last_rewards == [pytest.approx(0.3)]


def fake_python(folder: Path, body: str) -> str:
    """A Python that runs `body` in place of the script that it is given."""
    script = folder / "body.py"
    script.write_text(body)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')
    python.chmod(0o755)
    return str(python)


def test_a_run_is_over_with_its_last_batch(
    side: ModuleType, task: ModuleType, tmp_path: Path
) -> None:
    body = """
import json, os, sys, time
job = json.loads(sys.argv[2])
print("noise", flush=True)
for i in range(job["steps"]):
    print('STEP {"wall": %d, "cpu": %d, "reward": 0.5}' % (i, os.getpid()), flush=True)
time.sleep(600)
"""
    job = side.Job("trl", "model", str(tmp_path / "run"), task.Workload(), steps=3, lr=1e-3)
    steps = list(side.steps_of(job, python=fake_python(tmp_path, body)))
    assert [step.wall for step in steps] == [0, 1, 2]
    assert "noise" in (tmp_path / "run" / "log.txt").read_text()
    with pytest.raises(ProcessLookupError):
        os.kill(int(steps[0].cpu), 0)


def test_a_run_that_ends_too_early_says_why(
    side: ModuleType, task: ModuleType, tmp_path: Path
) -> None:
    job = side.Job("trl", "model", str(tmp_path / "run"), task.Workload(), steps=3, lr=1e-3)
    python = fake_python(tmp_path, "raise SystemExit('no memory left')")
    with pytest.raises(RuntimeError, match=r"(?s)trl ended after 0 steps:.*no memory left"):
        list(side.steps_of(job, python=python))


def gpu_benchmark(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu" / "vs_trl.py"), *flags],
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
def test_flags_that_cannot_work_are_refused() -> None:
    done = gpu_benchmark("--steps", "2")
    assert "--steps must be at least 3" in done.stderr
    done = gpu_benchmark("--micro-batch", "48")
    assert "--micro-batch 48 does not divide the 128 sequences of a batch" in done.stderr


@pytest.mark.slow
def test_agentrl_trains_on_the_task(side: ModuleType, task: ModuleType, tmp_path: Path) -> None:
    sizes = task.Workload(prompt=16, response=8, groups=2, members=2)
    job = side.Job("agentrl", "tiny", str(tmp_path / "run"), sizes, steps=3, lr=1e-3)
    steps = list(side.steps_of(job))
    assert len(steps) == 3
    assert all(0 <= step.reward <= 1 for step in steps)
    assert steps[0].wall < steps[1].wall < steps[2].wall
