"""Ctrl-C and SIGTERM with rollouts ahead of training: every instance is closed, and no process is
left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import whole_runs

FAKE = Path(__file__).parents[1] / "engines" / "fake"
AGENT = """
import asyncio
import agentrl as rl

def note(what):
    with open({log!r}, "a") as log:
        print(what, file=log)

def examples(split):
    return [{{"id": 0}}]

class Agent(rl.AgentInstance):
    async def reset(self, example):
        note("begun")
        return "go"

    async def step(self, action):
        await asyncio.sleep({seconds})
        return rl.StepResult(reward=float(len(action.text)), done=True)

    async def close(self):
        note("closed")
"""


def noted(log: Path) -> list[str]:
    return log.read_text().split() if log.exists() else []


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start(tmp_path: Path, seconds: float, *flags: str) -> subprocess.Popen[str]:
    """A run with rollouts ahead of training, whose steps take so long."""
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT.format(log=str(tmp_path / "log"), seconds=seconds))
    return whole_runs.start(
        [
            *("-m", "agentrl", "train", "--agent", str(agent)),
            *("--log.run_dir", str(tmp_path / "run")),
            *("--engine.kind", "vllm", "--engine.transport", "gloo"),
            *("--engine.env", json.dumps({"PYTHONPATH": str(FAKE)})),
            *("--engine.extra", json.dumps({"token_seconds": 0.01})),
            *("--train.max_staleness", "1", "--algo.correction.kind", "tis"),
            *("--rollout.batch_size", "2", "--rollout.n_samples_per_prompt", "2"),
            *("--rollout.max_new_tokens", "3", "--rollout.max_tokens", "160"),
            *("--train.max_steps", "1000", *flags),
        ]
    )


def wait_until_gone(family: list[psutil.Process]) -> None:
    deadline = time.monotonic() + 30
    while any(alive(each) for each in family):
        assert time.monotonic() < deadline, "a process outlived the run"
        time.sleep(0.05)


def is_rollout_process(process: psutil.Process) -> bool:
    try:
        return "agentrl.executors.workers" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


TWO = ("--rollout.num_processes", "2")


@pytest.mark.parametrize(
    ("backend", "signum", "signals", "flags"),
    [
        ("thread", signal.SIGINT, 1, ()),
        ("process", signal.SIGINT, 2, ()),
        pytest.param("thread", signal.SIGINT, 1, TWO, marks=pytest.mark.slow),
        pytest.param("thread", signal.SIGINT, 2, TWO, marks=pytest.mark.slow),
        pytest.param("process", signal.SIGINT, 2, TWO, marks=pytest.mark.slow),
        pytest.param("thread", signal.SIGTERM, 1, TWO, marks=pytest.mark.slow),
        pytest.param("process", signal.SIGTERM, 2, TWO, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_left_open_or_running_after_a_signal(
    tmp_path: Path, backend: str, signum: signal.Signals, signals: int, flags: tuple[str, ...]
) -> None:
    log, run_dir = tmp_path / "log", tmp_path / "run"
    seconds = 0.1 if signals == 1 else 600
    process = start(tmp_path, seconds, "--rollout.env_backend", backend, *flags)
    if signals == 1:
        whole_runs.wait_for_step(run_dir, 1, process)
    else:  # all that may run wait in a step that does not end: two batches of four episodes
        while noted(log).count("begun") < 8:
            assert process.poll() is None, process.communicate()
            time.sleep(0.005)
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    for _ in range(signals):
        process.send_signal(signum)
        time.sleep(0.2)
    _, err = process.communicate(timeout=120)
    # The second raises KeyboardInterrupt, whichever it is.
    assert process.returncode == (128 + signum if signals == 1 else 130), err
    assert ("go on with --resume" in err) == (signals == 1)
    notes = noted(log)
    begun = notes.count("begun") + (backend == "process")  # the probe's instance, never reset
    if signals == 1:
        assert any((run_dir / "checkpoints").iterdir())
    assert notes.count("closed") - begun in (0, 1)
    wait_until_gone(family)
    assert not os.path.exists(f"/proc/{process.pid}")


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_run_that_is_ended_while_its_processes_start(
    tmp_path: Path, signum: signal.Signals
) -> None:
    process = start(tmp_path, 600, *TWO)
    family: list[psutil.Process] = []
    while len([each for each in family if is_rollout_process(each)]) < 2:
        assert process.poll() is None, process.communicate()
        family = psutil.Process(process.pid).children(recursive=True)
        time.sleep(0.02)
    for _ in range(2):
        process.send_signal(signum)
        time.sleep(0.2)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (-9 if signum == signal.SIGKILL else 130), err
    assert "Traceback" not in err
    wait_until_gone(family)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["thread", "process"])
def test_no_rollout_process_outlives_a_run_that_is_killed(tmp_path: Path, backend: str) -> None:
    process = start(tmp_path, 600, "--rollout.env_backend", backend, *TWO)
    while noted(tmp_path / "log").count("begun") < 8:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.communicate()
    wait_until_gone(family)
