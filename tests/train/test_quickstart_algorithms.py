"""The quickstart learns with each of the main algorithms, in a run as a user starts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from whole_runs import AGENT, ROOT, run

STEPS = 200
NO_GROUPS = ("--algo.advantage.drop_zero_variance", "true")  # its default: they compare none
SETTINGS = {
    "grpo": ("--algo.entropy_coef", "0.01"),
    "gspo": ("--algo.entropy_coef", "0.01", "--algo.loss.kind", "gspo"),
    # Its advantages are not divided by a deviation, so that the same entropy weighs more.
    "rloo": (
        *("--algo.entropy_coef", "0.004", "--algo.advantage.estimator", "rloo"),
        *("--train.lr", "3e-3"),
    ),
    "reinforce_plus_plus": (
        *("--algo.entropy_coef", "0.01", "--algo.advantage.estimator", "reinforce_plus_plus"),
        *NO_GROUPS,
    ),
    "ppo": (
        *("--algo.entropy_coef", "0.005", "--algo.advantage.estimator", "gae"),
        *("--algo.advantage.lam", "1", *NO_GROUPS),
    ),
}


def command(run_dir: Path, *flags: str) -> list[str]:
    return [
        *("-m", "agentrl", "train", "--agent", str(AGENT), "--log.run_dir", str(run_dir)),
        *("--config", str(ROOT / "examples" / "quickstart.toml"), "--train.save_steps", "0"),
        *("--train.max_steps", str(STEPS)),
        *("--train.ppo_epochs", "1", "--train.mini_batches", "8"),
        *("--train.lr", "2e-3", "--train.lr_scheduler", "cosine", *flags),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", SETTINGS)
def test_the_quickstart_learns(algorithm: str, tmp_path: Path) -> None:
    status, _, err = run(command(tmp_path / "run", *SETTINGS[algorithm]), timeout=1800)
    assert status == 0, err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["reward_first"] < 0.2
    assert summary["reward_last"] >= 0.9
