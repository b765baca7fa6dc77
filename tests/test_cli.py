"""The command `agentrl` as a user types it, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import agentrl
from agentrl import cli
from agentrl.config import Config
from agentrl.errors import AgentRLError


def run(*argv: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "import sys; from agentrl.cli import main; sys.exit(main())"]
    return subprocess.run(
        [*command, *argv], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True
    )


def test_help_is_what_bare_agentrl_prints(tmp_path: Path) -> None:
    bare, asked = run(cwd=tmp_path), run("--help", cwd=tmp_path)
    assert bare.returncode == asked.returncode == 0
    assert bare.stdout == asked.stdout
    assert all(name in bare.stdout for name in ("train", "eval", "check", "view"))


def test_version(tmp_path: Path) -> None:
    assert run("--version", cwd=tmp_path).stdout == f"agentrl {agentrl.__version__}\n"


def test_help_and_dry_run_do_not_import_what_is_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; from agentrl.cli import main\n"
        "main(['train', '--agent', 'a.py', '--dry-run'])\n"
        "heavy = {'torch', 'transformers', 'deepspeed', 'matplotlib', 'pyarrow', 'jinja2'}\n"
        "sys.stderr.write(' '.join(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stderr == ""


def test_a_dry_run_can_be_fed_back(tmp_path: Path) -> None:
    first = run(
        "train", "--agent", "a.py", "--train.lr", "0.5", "--train.seed=3", "--dry-run", cwd=tmp_path
    )
    (tmp_path / "run.toml").write_text(first.stdout)
    second = run("train", "--config", "run.toml", "--dry-run", cwd=tmp_path)
    assert tomllib.loads(first.stdout)["train"]["lr"] == 0.5
    assert second.stdout == first.stdout


@pytest.mark.parametrize(
    "argv",
    [
        ["trian"],
        ["train"],
        ["train", "--agent", "a.py", "--train.l", "1"],
        ["train", "--agent", "a.py", "--train.lr", "x"],
        ["train", "--agent", "a.py", "--config", "absent.toml"],
        ["train", "--agent", "a.py", "--resume", "absent"],
        ["train", "--agent", "a.py", "--resume"],
        ["train", "--resume", "x", "--log.run_dir", "y"],
        ["eval", "--agent", "a.py", "--rollout.max_tokens", "8"],
        ["view"],
        ["view", "absent"],
    ],
)
def test_wrong_usage_is_one_message_on_stderr_and_status_2(argv: list[str], tmp_path: Path) -> None:
    done = run(*argv, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("agentrl: ")
    assert len(done.stderr.splitlines()) == 1


def test_only_rank_0_complains_of_the_command_line(tmp_path: Path) -> None:
    done = run("train", "--nothing", cwd=tmp_path, RANK="1")
    assert (done.returncode, done.stderr) == (2, "")


def make_run(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(text)


def resumed(monkeypatch: pytest.MonkeyPatch, *argv: str) -> Config:
    """The configuration that `train --resume` would train with."""
    seen: list[Config] = []
    monkeypatch.setattr(cli, "_dry_run", lambda config: lambda: seen.append(config) or 0)
    assert cli.main(["train", *argv, "--dry-run"]) == 0
    return seen[0]


def test_resume_takes_the_configuration_of_the_run_and_flags_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "r", 'agent = "a.py"\n[train]\nseed = 5\nmax_steps = 10\n')
    config = resumed(monkeypatch, "--resume", str(tmp_path / "r"), "--train.max_steps", "20")
    assert (config.train.seed, config.train.max_steps) == (5, 20)
    assert config.log.run_dir == tmp_path / "r"


def test_resume_without_a_directory_takes_log_run_dir_or_the_newest_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b", "a-20250101-120000", "a-20250201-120000", "other-20260101-120000"):
        make_run(tmp_path / "runs" / name, 'agent = "a.py"\n')
    newest = resumed(monkeypatch, "--agent", "a.py", "--resume")
    assert newest.log.run_dir == Path("runs/a-20250201-120000")
    named = resumed(monkeypatch, "--agent", "a.py", "--log.run_dir", "runs/b", "--resume")
    assert named.log.run_dir == Path("runs/b")


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (AgentRLError("the disk is full"), 1),
        (KeyboardInterrupt(), 130),
        (BaseExceptionGroup("of a library's tasks", [KeyboardInterrupt()]), 130),
    ],
)
def test_a_failed_run_says_why_without_a_traceback(
    raised: BaseException,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> int:
        raise raised

    monkeypatch.setattr(cli, "_parse", lambda argv: fail)
    assert cli.main([]) == status
    assert capsys.readouterr().err == f"agentrl: {raised or 'interrupted'}\n" or status == 130


def test_an_unexpected_exception_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "_parse", lambda argv: fail)
    with pytest.raises(ZeroDivisionError):
        cli.main([])
