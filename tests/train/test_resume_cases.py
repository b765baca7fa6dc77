"""A run that is killed and resumed trains every episode once, none twice and none never."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from agentrl.train.trajectories import read_trajectories

AGENT = Path(__file__).parents[2] / "examples" / "agents" / "number_guess.py"
EXAMPLES, BATCH, MEMBERS, STEPS = 4, 2, 2, 5


def start(run_dir: Path, *flags: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "agentrl", "train", "--agent", str(AGENT)),
            *("--log.run_dir", str(run_dir), "--data.max_samples", str(EXAMPLES)),
            *("--rollout.batch_size", str(BATCH), "--rollout.n_samples_per_prompt", str(MEMBERS)),
            *("--rollout.max_new_tokens", "3", "--rollout.max_turns", "2"),
            *("--rollout.max_tokens", "160", "--train.max_steps", str(STEPS)),
            *("--train.save_steps", "2", *flags),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def finish(process: subprocess.Popen[str]) -> None:
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err


def steps_of(run_dir: Path) -> list[int]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def state_of(run_dir: Path) -> tuple[list[int], bytes, int]:
    summary = json.loads((run_dir / "summary.json").read_text())
    weights = (run_dir / "model" / "model.safetensors").read_bytes()
    return steps_of(run_dir), weights, summary["steps"]


def test_a_run_killed_at_the_end_of_an_epoch_trains_every_episode_exactly_once(tmp_path: Path):
    """NeMo-RL#3599: prompts in flight were lost; verl#7933, PR#5725: a step counted twice, or
    nothing trained at an epoch's end. Four examples in batches of two: step 2 ends an epoch."""
    run_dir = tmp_path / "run"
    process = start(run_dir)
    checkpoint = run_dir / "checkpoints" / "step-00000002"
    while not checkpoint.is_dir():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    finish(start(run_dir, "--resume"))

    assert steps_of(run_dir) == list(range(1, STEPS + 1))
    episodes = [
        trajectory
        for step in range(1, STEPS + 1)
        for trajectory in read_trajectories(run_dir / "trajectories" / f"{step:06d}.parquet")
    ]
    assert [trajectory.rollout_id for trajectory in episodes] == [
        f"{group:08d}-{member:03d}" for group in range(STEPS * BATCH) for member in range(MEMBERS)
    ]
    # Ten groups of four examples: two whole epochs, and half of a third.
    drawn = Counter(trajectory.example_id for trajectory in episodes[::MEMBERS])
    assert sorted(drawn.values()) == [2, 2, 3, 3]
    for epoch in (0, EXAMPLES):
        groups = episodes[::MEMBERS][epoch : epoch + EXAMPLES]
        assert len({trajectory.example_id for trajectory in groups}) == EXAMPLES

    # Resuming what is finished counts nothing again and trains nothing more.
    before = state_of(run_dir)
    finish(start(run_dir, "--resume"))
    assert state_of(run_dir) == before
    # With more steps it goes on behind the last one.
    finish(start(run_dir, "--resume", "--train.max_steps", str(STEPS + 1)))
    steps, _, counted = state_of(run_dir)
    assert steps == list(range(1, STEPS + 2))
    assert counted == STEPS + 1
