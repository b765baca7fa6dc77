"""The benchmark that shows learning on a GPU runs to its end without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu" / "learning.py"


def test_it_trains_evaluates_and_shows_the_same_questions_before_and_after(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = subprocess.run(
        [
            *(sys.executable, str(SCRIPT), "--engine", "transformers", "--dtype", "float32"),
            *("--steps", "2", "--groups", "2", "--members", "2", "--examples", "6"),
            *("--max-tokens", "1500", "--compared", "2", "--out", str(out)),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((out / "result.json").read_text())
    assert [row["step"] for row in result["held_out"]] == [0, 1, 2]
    assert [point["step"] for point in result["curve"]] == [1, 2]
    for distance in result["distance"].values():
        # What samples computes in float32 here, so that bfloat16 is further from it.
        assert distance["engine_to_float32"] < distance["bfloat16_to_float32"] < 0.01
        assert abs(distance["ratio_mean"] - 1) < 0.01
    page = (out / "trajectories.txt").read_text()
    for when in ("before", "after"):
        assert page.count(f"{when} training") == 4
    assert page.count("What is 832 + 347?") == 2
