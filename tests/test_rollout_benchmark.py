"""The benchmark of rollouts against the engine's own process, with a real engine on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engines.conftest import REAL, python_of

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu" / "rollout.py"
OPTIONS = {
    "vllm": "block_size = 32\nkv_cache_memory_bytes = 1073741824\nenforce_eager = true\n",
    "sglang": """
device = "cpu"
attention_backend = "torch_native"
sampling_backend = "pytorch"
grammar_backend = "none"
disable_overlap_schedule = true
mem_fraction_static = 0.3
max_total_tokens = 4096
""",
}
WORKLOAD = {"groups": 2, "members": 2, "turns": 2, "prompt": 64, "sampled": 4, "feedback": 4}
ENV = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "SGLANG_USE_CPU_ENGINE": "1",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", REAL)
def test_both_sides_take_turns_with_the_same_episodes(kind: str, tmp_path: Path) -> None:
    options = tmp_path / "options.toml"
    options.write_text('load_format = "dummy"\n' + OPTIONS[kind])
    done = subprocess.run(
        [
            *(sys.executable, SCRIPT, "--engine", kind, "--python", python_of(kind)),
            *("--shape", "tiny", "--options", options, "--workload", json.dumps(WORKLOAD)),
            *("--processes", "1", "2", "--api-servers", "2", "--rounds", "2", "--json"),
        ],
        env=os.environ | ENV,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    turns = [line for line in done.stderr.splitlines() if line.startswith("round ")]
    assert len(turns) == 3 * 2 * 3  # rounds, of which one warms up, ways, sides
    assert ["in process" in turn.split("tok/s")[0] for turn in turns] == [False, False, True] * 6
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["processes"].keys() == {"1", "2"}
    assert found[kind] in done.stdout.splitlines()[0]
    for ways in found["processes"].values():
        assert ways.keys() == {"with", "without"}
        for way in ways.values():
            assert len(way["rounds"]) == len(way["in_process_rounds"]) == 2
            rates = zip(way["rounds"], way["in_process_rounds"], strict=True)
            ratios = sorted(mine / limit for mine, limit in rates)
            assert ratios[0] <= way["ratio"] <= ratios[1]
            assert 0.5 < way["cache_hit_of_possible"] <= 1.01
            assert len(way["processor_seconds"]) == 2
