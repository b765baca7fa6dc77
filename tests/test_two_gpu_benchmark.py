"""The benchmark for two GPUs: whose turn it is, and its parts as far as a CPU can run them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks" / "gpu"
FAKE_ENGINES = os.pathsep.join([str(ROOT / "tests/engines/fake"), str(ROOT)])
STUB = """
import json, os, sys, time
from pathlib import Path

script, flags = Path(sys.argv[0]).stem, sys.argv[1:]
name = script + "-2" * ("WORLD_SIZE" in os.environ)
if "--engine" in flags:
    name += "-" + flags[flags.index("--engine") + 1]

def note(event):
    with Path(os.environ["NOTES"]).open("a") as notes:
        notes.write(f"{event} {name}\\n")

rank_0, out = os.environ.get("RANK", "0") == "0", Path(flags[-1])
if rank_0:
    note("begins")
    time.sleep(0.5)
    note("waits")
    out.with_suffix(".waits").touch()
sys.stdin.read()
if rank_0:
    note("turn")
    time.sleep(0.2)
    note("ends")
    out.write_text(json.dumps({
        "split_placement": {"a": {"bytes": 8e9, "update": 2.0}},
        "bare_broadcast": {"a": 1.0},
        "sharded_learner": {"a": {"seconds": 3.0}},
        "ahead_of_training": {"max_staleness 0": {}},
        "colocated_ranks": {"apart": {}},
    }[script]))
sys.exit(name == os.environ.get("FAILS"))
"""
"""In place of every script: notes what it does when, and leaves a result."""


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import two_gpus

    return two_gpus


@pytest.fixture
def run_stubs(
    two_gpus: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Callable[[], tuple[dict[str, Any], list[str]]]:
    """Gives what the benchmark makes of stubs, and what these noted."""
    for script in BENCHMARKS.glob("*.py"):
        (tmp_path / script.name).write_text(STUB)
    model, notes = tmp_path / "model", tmp_path / "notes"
    model.touch()
    monkeypatch.setattr(two_gpus, "HERE", tmp_path)
    monkeypatch.setenv("PYTHONPATH", FAKE_ENGINES)
    monkeypatch.setenv("NOTES", str(notes))
    flags = ("--engine", "vllm", "sglang", "--model", str(model), "--shapes", "tiny", "--json")
    monkeypatch.setattr(sys, "argv", ["two_gpus.py", *flags])

    def call() -> tuple[dict[str, Any], list[str]]:
        two_gpus.main()
        return json.loads(capfd.readouterr().out.splitlines()[-1]), notes.read_text().splitlines()

    return call


def run(*command: object, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_scripts_prepare_themselves_together_and_take_turns_alone(
    run_stubs: Callable[[], tuple[dict[str, Any], list[str]]],
) -> None:
    found, notes = run_stubs()
    turns = [
        *("sharded_learner", "split_placement-vllm", "split_placement-sglang", "bare_broadcast-2"),
        *("ahead_of_training-vllm", "sharded_learner-2", "colocated_ranks-2-vllm"),
    ]
    events = [note for note in notes if note.startswith(("turn", "ends"))]
    assert events == [f"{event} {name}" for name in turns for event in ("turn", "ends")]
    for name in turns[1:6]:
        assert notes.index(f"waits {name}") < notes.index(f"turn {turns[1]}")
    *_, both, colocated = turns
    assert notes.index("ends bare_broadcast-2") < notes.index(f"begins {colocated}")
    assert notes.index(f"waits {colocated}") < notes.index(f"turn {both}")

    assert found["engine"] == "vllm, sglang"
    for engine in ("vllm", "sglang"):
        assert found["split"][engine]["a"]["share_of_bare"] == 0.5
        assert found["split"][engine]["a"]["gigabytes_per_second"] == 4
    assert found["sharded"] == {"a": {"one": {"seconds": 3.0}, "two": {"seconds": 3.0}}}
    laps = ("start", "split", "asynchronous", "start of colocated", "sharded", "colocated")
    assert list(found["seconds"]) == [*laps, "whole"]
    assert found["seconds"]["whole"] == pytest.approx(sum(found["seconds"][lap] for lap in laps))


def test_a_script_that_fails_leaves_the_others_their_turns(
    run_stubs: Callable[[], tuple[dict[str, Any], list[str]]],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FAILS", "split_placement-sglang")
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--parts", "split", "asynchronous"])
    with pytest.raises(SystemExit, match="1"):
        run_stubs()
    found = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert found["split"]["sglang"] == {"failed": "split_placement.py ended with status 1"}
    assert found["split"]["vllm"]["a"]["bare_seconds"] == 1
    assert found["asynchronous"] == {"max_staleness 0": {}}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--engine", "vllm"), "the part asynchronous trains a real model"),
        (("--engine", "vllm", "sglang", "--parts", "colocated"), "more than one engine: name one"),
        (("--python", "no-python", "--parts", "split"), "no-python has no package vllm"),
    ],
)
def test_what_is_missing_is_said_before_anything_begins(
    two_gpus: ModuleType,
    flags: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["two_gpus.py", *flags])
    with pytest.raises(SystemExit, match="2"):
        two_gpus.main()
    assert message in capsys.readouterr().err


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_server_says_what_the_model_on_the_other_side_says(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    run(
        *(BENCHMARKS / "split_placement.py", "--engine", "sglang", "--shapes", "tiny"),
        *("--in-flight", "2", "--out", out),
        PYTHONPATH=FAKE_ENGINES,
    )
    found = json.loads(out.read_text())["tiny"]
    assert found["ended_early"] == 2
    assert found["clear_agreement"] == 1
    assert found["logprob_difference"] < 0.05  # both in bfloat16, by different code


@pytest.mark.slow
def test_two_ranks_take_turns_with_engines_that_say_what_the_learner_says(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(BENCHMARKS / "colocated_ranks.py", "--engine", "vllm", "--shape", "tiny"),
        *("--rounds", "1", "--prompts", "1", "--sequences", "1", "--out", out),
        *("--env", json.dumps({"PYTHONPATH": FAKE_ENGINES})),
    )
    found = json.loads(out.read_text())
    assert "start" in found["start"]["seconds"]
    for arrangement, engines in (("apart", 2), ("tensor parallel", 1)):
        turns = found[arrangement]
        for differences in turns["logprob_difference"].values():
            assert len(differences) == engines
            assert max(differences) < 0.05  # both in bfloat16, by different code
        assert {"sleep", "update", "replace the weights"} <= turns["seconds"].keys()
