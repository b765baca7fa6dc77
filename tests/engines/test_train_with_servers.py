"""Training with real servers, by the command line that a user types: it learns, and it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from engines.conftest import REAL_KINDS, python_of

ROOT = Path(__file__).parents[2]
AGENT = ROOT / "examples" / "agents" / "number_guess.py"
QUICKSTART = ROOT / "examples" / "quickstart.toml"
SMALL = (
    *("--rollout.batch_size", "8", "--rollout.n_samples_per_prompt", "4"),
    *("--rollout.max_new_tokens", "3", "--rollout.max_turns", "3", "--rollout.max_tokens", "128"),
)

pytestmark = pytest.mark.engine


def start(arguments: list[str], kind: str, transport: str, log: Path) -> subprocess.Popen[bytes]:
    """`agentrl train` with a server; what it prints goes to a file."""
    command = [sys.executable, "-m", "agentrl", "train", *arguments]
    command += ["--engine.kind", kind, "--engine.python", python_of(kind)]
    command += ["--engine.transport", transport]
    with log.open("ab") as file:
        return subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until `step` was logged."""
    file = run_dir / "metrics.jsonl"
    while not (file.exists() and file.read_text().count("\n") >= step):
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def family_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Every process below one, the server's workers included."""
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2  # a supervisor and its server
    return family


def assert_gone(family: list[psutil.Process]) -> None:
    assert psutil.wait_procs(family, timeout=30)[1] == []


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kind", "transport"), [("vllm", "gloo"), ("sglang", "disk")])
def test_a_killed_run_leaves_no_process_and_goes_on_where_it_was(
    kind: str, transport: str, tmp_path: Path
) -> None:
    # AReaL#622, rllm PR#568
    run_dir, log = tmp_path / "run", tmp_path / "output"
    new = ["--agent", str(AGENT), "--log.run_dir", str(run_dir), *SMALL]
    # One optimizer step a batch, so that its old log-probabilities meet unchanged weights; at
    # T = 0.6 the engine's and the learner's are then the same (TRL#4159, verl#6240).
    new += ["--rollout.temperature", "0.6", "--train.max_steps", "4", "--train.save_steps", "1"]
    new += ["--rollout.logprobs", "sampler", "--algo.advantage.drop_zero_variance", "false"]
    process = start(new, kind, transport, log)
    wait_for_step(run_dir, 2, process, log)
    family = family_of(process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert_gone(family)

    process = start(["--resume", str(run_dir)], kind, transport, log)
    wait_for_step(run_dir, 4, process, log)
    family = family_of(process)
    assert process.wait(120) == 0, log.read_text()
    assert_gone(family)
    metrics = metrics_of(run_dir)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    for line in metrics:
        assert line["mismatch/log_ratio_max"] < 1e-3
        assert line["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", REAL_KINDS)
def test_rollout_processes_sample_what_the_learner_would(kind: str, tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "output"
    arguments = ["--agent", str(AGENT), "--config", str(QUICKSTART), "--log.run_dir", str(run_dir)]
    arguments += ["--rollout.num_processes", "2", "--rollout.logprobs", "sampler"]
    process = start([*arguments, "--train.max_steps", "2"], kind, "gloo", log)
    wait_for_step(run_dir, 1, process, log)
    family = family_of(process)
    assert process.wait(300) == 0, log.read_text()
    assert_gone(family)
    for line in metrics_of(run_dir):
        assert line["rollout/completed"] == 256
        assert line["rollout/failed"] == 0
        assert line["engine/requests"] >= 256
        assert line["mismatch/log_ratio_max"] < 1e-3


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", REAL_KINDS)
@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_told_to_stop_saves_and_ends_its_servers(
    kind: str, signum: signal.Signals, status: int, tmp_path: Path
) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "output"
    arguments = ["--agent", str(AGENT), "--log.run_dir", str(run_dir), *SMALL]
    process = start([*arguments, "--train.max_steps", "1000"], kind, "gloo", log)
    wait_for_step(run_dir, 1, process, log)
    family = family_of(process)
    process.send_signal(signum)
    assert process.wait(120) == status
    assert_gone(family)
    assert "go on with --resume" in log.read_text()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", REAL_KINDS)
@pytest.mark.parametrize("transport", ["gloo", "disk"])
def test_the_quickstart_learns_with_a_server(kind: str, transport: str, tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "output"
    arguments = ["--agent", str(AGENT), "--config", str(QUICKSTART), "--log.run_dir", str(run_dir)]
    process = start(arguments, kind, transport, log)
    assert process.wait(3000) == 0, log.read_text()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == 150
    assert summary["reward_first"] < 0.35
    assert summary["reward_last"] >= 0.9
    # Every token of a step comes from the weights of the step before.
    found = [line.get("mismatch/log_ratio_max", 0.0) for line in metrics_of(run_dir)]
    assert max(found) < 1e-2
