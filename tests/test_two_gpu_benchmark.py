"""The parts of the benchmark for two GPUs that two processes on a CPU can run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks" / "gpu"


def run(*command: object) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_ranks_make_the_updates_of_one() -> None:
    case = {"name": "tiny", "shape": "tiny", "dtype": "float32", "length": 64, "steps": 2}
    printed = run(
        *(BENCHMARKS / "two_gpus.py", "--parts", "sharded", "--json"),
        *("--cases", json.dumps([case])),
    )
    found = json.loads(printed.splitlines()[-1])["sharded"]["tiny"]
    assert found["loss_relative_difference"] < 2e-5
    assert found["grad_norm_relative_difference"] < 2e-5
    assert found["weight_difference"] < found["weight_movement"] / 10
    assert found["two"]["tokens_per_second"] > 0


def test_two_ranks_take_turns_with_engines_that_say_what_the_learner_says(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(BENCHMARKS / "colocated_ranks.py", "--engine", "vllm", "--shape", "tiny"),
        *("--rounds", "1", "--prompts", "1", "--sequences", "1", "--out", out),
        *("--env", json.dumps({"PYTHONPATH": f"{ROOT / 'tests/engines/fake'}:{ROOT}"})),
    )
    found = json.loads(out.read_text())
    assert "start" in found["start"]["seconds"]
    for arrangement, engines in (("apart", 2), ("tensor parallel", 1)):
        turns = found[arrangement]
        for differences in turns["logprob_difference"].values():
            assert len(differences) == engines
            assert max(differences) < 0.05  # both in bfloat16, by different code
        assert {"sleep", "update", "replace the weights"} <= turns["seconds"].keys()
