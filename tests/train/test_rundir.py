"""A run directory: never two runs in one, nothing half written, cut back on resume."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import Config
from agentrl.errors import SaveError, UsageError
from agentrl.settings import read_toml, resolve
from agentrl.train import rundir
from agentrl.train.files import replace_text, replacing
from agentrl.train.metrics_file import read_metrics
from agentrl.train.rundir import RunDir, newest_run, write_summary
from agentrl.train.trajectories import write_rows, write_trajectories


def config_for(path: Path | None, agent: str = "agents/guess.py") -> Config:
    return Config.model_validate({"agent": agent, "log": {"run_dir": path}})


def test_a_new_run_holds_its_resolved_configuration(tmp_path: Path) -> None:
    config = config_for(tmp_path / "runs" / "r")
    with RunDir.create(config) as run:
        assert resolve([read_toml(run.config_file)]) == config


def test_a_run_without_a_name_is_called_after_agent_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [RunDir.create(config_for(None)) for _ in range(3)]
    assert len({run.path for run in runs}) == 3
    for run in runs:
        assert run.path.parent == Path("runs")
        assert run.path.name.startswith("guess-20")
    assert newest_run(Path("elsewhere/guess.py")) in {run.path for run in runs}


def test_a_directory_that_holds_something_is_refused_with_both_remedies(tmp_path: Path) -> None:
    (tmp_path / "precious.txt").write_text("x")
    with pytest.raises(UsageError, match=r"not empty: .*--resume.*--log\.run_dir"):
        RunDir.create(config_for(tmp_path))
    assert (tmp_path / "precious.txt").read_text() == "x"


def test_a_run_directory_that_cannot_be_made_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot use the run directory .*--log\.run_dir"):
        RunDir.create(config_for(tmp_path / "file" / "r"))


def test_two_processes_cannot_hold_one_run_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from agentrl.config import Config\n"
        "from agentrl.train.rundir import RunDir\n"
        "config = Config.model_validate({'agent': 'a.py', 'log': {'run_dir': sys.argv[1]}})\n"
        "run = RunDir.create(config); print('held', flush=True); time.sleep(60)\n"
    )
    path = tmp_path / "r"
    holder = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    try:
        with pytest.raises(UsageError, match=f"in use by process {holder.pid}"):
            RunDir.resume(config_for(path), 0)
    finally:
        os.kill(holder.pid, signal.SIGKILL)
        holder.communicate()
    RunDir.resume(config_for(path), 0).close()


def test_resuming_cuts_off_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    config = config_for(tmp_path / "r")
    with RunDir.create(config) as run:
        run.metrics_file.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 6)))
        for step in range(1, 6):
            write_trajectories(run.trajectories, step, [])
        write_trajectories(run.trajectories, 3, [], evaluation=True)
        write_trajectories(run.trajectories, 5, [], evaluation=True)
        write_rows(run.trajectories / "unfinished" / "000001.parquet", None, [])
    with RunDir.resume(config, 3) as run:
        assert [row["step"] for row in read_metrics(run.metrics_file)] == [1, 2, 3]
        assert sorted(path.name for path in run.trajectories.iterdir()) == [
            "000001.parquet",
            "000002.parquet",
            "000003.parquet",
            "eval-000003.parquet",
        ]


def test_resuming_leaves_what_is_not_the_runs_and_cuts_off_what_a_crash_left(
    tmp_path: Path,
) -> None:
    config = config_for(tmp_path / "r")
    RunDir.create(config).close()
    for scraps in (b'{"step": 2, "rew\n', b'{"step": 2, "rew', b"\x00\xff\n", b"null\n", b"{}\n"):
        with RunDir.resume(config, 1) as run:
            write_trajectories(run.trajectories, 2, [])
            (run.trajectories / "mine.parquet").write_bytes(b"")
            run.metrics_file.write_bytes(b'{"step": 1}\n' + scraps)
            assert read_metrics(run.metrics_file) == [{"step": 1}]
        with RunDir.resume(config, 1) as run:
            assert run.metrics_file.read_text() == '{"step": 1}\n'
            assert [path.name for path in run.trajectories.iterdir()] == ["mine.parquet"]


def test_factors_that_are_saved_are_not_added_in_another_measure(tmp_path: Path) -> None:
    def config(alpha: float) -> Config:
        lora = {"rank": 4, "alpha": alpha}
        log = {"run_dir": tmp_path / "r"}
        return Config.model_validate({"agent": "a.py", "model": {"lora": lora}, "log": log})

    RunDir.create(config(16)).close()
    with pytest.raises(UsageError, match=r"trained with model\.lora\.alpha 16.*set it to 16"):
        RunDir.resume(config(8), 1)
    RunDir.resume(config(16), 1).close()  # the refusal has let go of the lock, and changed nothing
    RunDir.resume(config(8), 0).close()  # nothing is saved yet


def test_a_run_that_failed_before_its_first_step_is_taken_over(tmp_path: Path) -> None:
    with RunDir.create(config_for(tmp_path / "r", "agents/wrong.py")) as run:
        run.metrics_file.write_text('{"ste')
        write_trajectories(run.trajectories, 1, [])
    corrected = config_for(tmp_path / "r")
    with RunDir.create(corrected) as run:
        assert resolve([read_toml(run.config_file)]) == corrected
        assert run.metrics_file.read_text() == ""
        assert list(run.trajectories.iterdir()) == []


def test_an_evaluation_before_the_first_step_is_made_again_with_it(tmp_path: Path) -> None:
    config = config_for(tmp_path / "r")
    for begin in (RunDir.create, RunDir.create, lambda config: RunDir.resume(config, 0)):
        with begin(config) as run:
            assert read_metrics(run.metrics_file) == []
            assert not list(run.trajectories.glob("*"))
            run.metrics_file.write_text('{"step": 0, "eval/reward_mean": 0.5}\n')
            run.trajectories.mkdir(exist_ok=True)
            write_trajectories(run.trajectories, 0, [], evaluation=True)


@pytest.mark.parametrize("finished", ["metrics.jsonl", "checkpoints/step-00000001", "model"])
def test_a_run_of_which_something_is_finished_is_not_taken_over(
    tmp_path: Path, finished: str
) -> None:
    config = config_for(tmp_path / "r")
    RunDir.create(config).close()
    if finished == "metrics.jsonl":
        (tmp_path / "r" / finished).write_text('{"step": 1}\n')
    else:
        (tmp_path / "r" / finished).mkdir(parents=True)
    with pytest.raises(UsageError, match="not empty"):
        RunDir.create(config)


def test_there_is_nothing_to_resume_where_no_run_is(tmp_path: Path) -> None:
    for path in (None, tmp_path / "absent"):
        with pytest.raises(UsageError, match="nothing to resume"):
            RunDir.resume(config_for(path), 0)
    assert not (tmp_path / "absent").exists()


def test_the_summary_is_json(tmp_path: Path) -> None:
    path = write_summary(tmp_path, {"reward_first": 0.25, "steps": 10})
    assert json.loads(path.read_text()) == {"reward_first": 0.25, "steps": 10}


def test_a_failed_write_leaves_the_old_file_and_no_scraps(tmp_path: Path) -> None:
    path = tmp_path / "f"
    replace_text(path, "old")

    def fail_halfway() -> None:
        with replacing(path) as scratch:
            scratch.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("f", "old")]


def test_a_full_disk_is_one_message_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_summary(tmp_path, {"steps": 1})

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SaveError, match=r"summary\.json: No space left on device.*--resume"):
        rundir.write_summary(tmp_path, {"steps": 2})
    assert json.loads(path.read_text()) == {"steps": 1}
