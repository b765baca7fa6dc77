"""A short soak: broken episodes among thousands are counted exactly, and nothing is left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


def test_a_short_soak_counts_every_episode_and_leaves_nothing() -> None:
    # The script itself compares the counters with what must come of the episodes.
    command = [sys.executable, BENCHMARK, "--json", "--episodes", "2000", "--rounds", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["completed"] + result["dropped"] == result["episodes"] == 2000
    assert (result["tasks_left"], result["threads_left"]) == (0, 0)
    assert result["memory_growth"] < 0.02
