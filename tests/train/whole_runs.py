"""Whole runs in processes of their own, for the tests of the loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
AGENT = ROOT / "examples" / "agents" / "number_guess.py"
STEPS = 6
TIMES = (
    *("time/", "throughput/", "episode/", "rollout/seconds"),
    *("engine/ttft_", "engine/tpot_", "engine/request_latency_"),
    *("train/tokens_per_second", "train/tflops", "train/mfu"),
    *("engine/prefill_tokens_per_second", "engine/decode_tokens_per_second"),
)
"""Metrics that are times, or that times are in: no run repeats them."""


def command(run_dir: Path, *flags: str) -> list[str]:
    return [
        *("-m", "agentrl", "train", "--agent", str(AGENT), "--log.run_dir", str(run_dir)),
        *("--rollout.batch_size", "8", "--rollout.n_samples_per_prompt", "4"),
        *("--rollout.max_new_tokens", "3", "--rollout.max_turns", "3"),
        *("--rollout.max_tokens", "160", "--train.mini_batches", "2", "--train.lr", "1e-3"),
        *("--train.max_steps", str(STEPS), "--train.save_steps", "2", *flags),
    ]


def start(arguments: list[str], **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        **options,  # type: ignore[call-overload]
    )


def run(arguments: list[str], *, timeout: float = 300, **options: object) -> tuple[int, str, str]:
    """Exit status, output and errors of a process that may take `timeout` seconds."""
    process = start(arguments, **options)
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def metrics_of(run_dir: Path) -> list[dict[str, float]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if not key.startswith(TIMES)}
        for line in lines
    ]


def weights_of(run_dir: Path) -> bytes:
    return (run_dir / "model" / "model.safetensors").read_bytes()


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Until `step` was logged and the next one is probably under way."""
    file = run_dir / "metrics.jsonl"
    while not (file.exists() and file.read_text().count("\n") >= step):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


def assert_same_run(run_dir: Path, other: Path) -> None:
    assert metrics_of(run_dir) == metrics_of(other)
    assert weights_of(run_dir) == weights_of(other)
