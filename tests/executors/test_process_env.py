"""Environments in processes of their own: what breaks there takes nothing along."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from textwrap import dedent

import psutil
import pytest

from agentrl.chat import ChatFormat
from agentrl.config import DataConfig, RolloutConfig
from agentrl.engines.scripted import ScriptedEngine
from agentrl.errors import AgentError, UsageError
from agentrl.executors.groups import GroupRequest, RolloutResult
from agentrl.executors.multi_turn import MultiTurnExecutor
from agentrl.executors.scheduler import RolloutScheduler
from agentrl.models.tiny import build_tiny_tokenizer
from agentrl.plugin import load_agent
from agentrl.types import SamplingParams, StopReason

AGENT = """
import asyncio, ctypes, os, random, subprocess, time
import agentrl as rl

class Env(rl.AgentInstance):
    def __init__(self):
        self.leak = None

    def reset(self, example):
        self.example = example
        return f"{os.getpid()} {random.random()}"

    async def step(self, action):
        match self.example["does"]:
            case "crash":
                ctypes.string_at(0)
            case "exit":
                os._exit(3)
            case "spin":
                while True:
                    pass
            case "raise":
                raise ValueError("no such move")
            case "unpicklable":
                return lambda: None
            case "start":
                started = subprocess.Popen(["sleep", "600"])
                return rl.StepResult(reward=1.0, done=True, metrics={"started": started.pid})
            case "wait":
                await asyncio.Event().wait()
            case "sleep":
                time.sleep(600)
        return rl.StepResult(reward=1.0, done=True, metrics={"pid": os.getpid()})

    def close(self):
        with open(self.example["log"], "a") as log:
            print(os.getpid(), file=log)
"""


LATER = """
    def reset(self, example):
        self.example = example
        return self.later()

    async def later(self):
        await asyncio.sleep(0)
        return "in a while"
"""


def make_executor(tmp_path: Path, *, coroutines: bool = False, **rollout) -> MultiTurnExecutor:
    path = tmp_path / "agent.py"
    path.write_text(
        AGENT if coroutines else AGENT.replace("async def", "def").replace("await ", "")
    )
    config = RolloutConfig(**({"env_backend": "process"} | rollout))
    executor = load_agent(path).make_executor(config, DataConfig(), probe=False)
    assert isinstance(executor, MultiTurnExecutor)
    return executor


async def run(executor: MultiTurnExecutor, tmp_path: Path, *does: str) -> RolloutResult:
    """One episode for each of what it does; the processes are gone when this returns."""
    scheduler = RolloutScheduler.local(
        executor,
        ScriptedEngine([[10, 11]]),
        ChatFormat(build_tiny_tokenizer()),
        SamplingParams(max_new_tokens=8),
        executor.rollout,
    )
    log = str(tmp_path / "closed")
    requests = [
        GroupRequest(f"{number:03d}", "e", {"does": what, "log": log}, 1)
        for number, what in enumerate(does)
    ]
    try:
        return await scheduler.run(requests)
    finally:
        await executor.close()
        if executor.rollout.env_backend == "process":
            assert not [p for p in children(recursive=True) if alive(p)]


def closed(tmp_path: Path) -> list[int]:
    return [int(line) for line in (tmp_path / "closed").read_text().split()]


OTHERS: set[psutil.Process] = set()
"""What other tests left: torch and multiprocessing each keep a process for shared memory."""


@pytest.fixture(autouse=True)
def _count_others(monkeypatch: pytest.MonkeyPatch) -> None:
    found = set(psutil.Process().children(recursive=True))
    monkeypatch.setitem(globals(), "OTHERS", found)


def children(recursive: bool = False) -> list[psutil.Process]:
    """Below this process, without those of other tests."""
    found = psutil.Process().children(recursive=recursive)
    return [process for process in found if process not in OTHERS]


def alive(process: psutil.Process) -> bool:
    """Whether it still runs: one that ended may wait for a while to be reaped."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_end(*processes: psutil.Process) -> None:
    deadline = time.monotonic() + 60
    while any(alive(each) for each in processes):
        assert time.monotonic() < deadline, "a process did not end"
        time.sleep(0.005)


@pytest.mark.parametrize("coroutines", [False, True])
async def test_every_episode_has_a_fresh_process_that_is_closed_and_ended(
    tmp_path: Path, coroutines: bool
) -> None:
    executor = make_executor(tmp_path, coroutines=coroutines)
    result = await run(executor, tmp_path, *["play"] * 6)
    assert result.num_completed == 6
    pids = {int(t.metrics["pid"]) for t in result.trajectories}
    assert len(pids) == 6
    assert os.getpid() not in pids
    assert sorted(closed(tmp_path)) == sorted(pids)
    drawn = {t.messages[0]["content"].split()[1] for t in result.trajectories}
    assert len(drawn) == 6  # forked processes do not share a random state


@pytest.mark.parametrize("coroutines", [False, True])
async def test_what_breaks_in_a_process_is_its_episodes_failure_alone(
    tmp_path: Path, coroutines: bool
) -> None:
    executor = make_executor(tmp_path, coroutines=coroutines, max_retries=0)
    does = ["play", "crash", "exit", "raise", "unpicklable", "play"]
    result = await run(executor, tmp_path, *does)
    assert result.num_completed == 2
    assert result.num_failed == {StopReason.ENV_ERROR: 4}
    crash, end, error, value = (t.error or "" for t in result.dropped)
    assert "process was ended by SIGSEGV during step" in crash
    assert "process ended with status 3 during step" in end
    assert "in step" in error
    assert "ValueError: no such move" in error
    assert "cannot travel between processes" in value
    assert len(closed(tmp_path)) == 4  # those that died could not


@pytest.mark.parametrize("does", ["spin", "sleep"])
async def test_a_process_that_hangs_is_killed_while_others_go_on(tmp_path: Path, does: str) -> None:
    executor = make_executor(tmp_path, max_retries=0, step_timeout=0.3, close_timeout=0.2)
    result = await run(executor, tmp_path, "play", does, "play")
    assert result.num_completed == 2
    assert result.num_failed == {StopReason.TIMEOUT: 1}
    assert "Env.step did not return within 0.3 s" in (result.dropped[0].error or "")
    assert len(closed(tmp_path)) == 2


async def test_a_coroutine_that_hangs_is_cancelled_and_closed(tmp_path: Path) -> None:
    executor = make_executor(tmp_path, coroutines=True, max_retries=0, step_timeout=0.3)
    result = await run(executor, tmp_path, "play", "wait")
    assert result.num_failed == {StopReason.TIMEOUT: 1}
    assert len(closed(tmp_path)) == 2


async def test_what_an_environment_started_ends_with_its_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = await run(make_executor(tmp_path), tmp_path, *["start"] * 20)
    assert result.num_completed == 20
    for episode in result.trajectories:
        with suppress(psutil.NoSuchProcess):
            wait_for_end(psutil.Process(int(episode.metrics["started"])))
    assert capfd.readouterr().err == ""


async def test_a_plain_method_may_return_a_coroutine(tmp_path: Path) -> None:
    executor = make_executor(tmp_path)
    (tmp_path / "agent.py").write_text(
        AGENT.replace("async def", "def").replace("await ", "") + LATER
    )
    runner = executor.runner("r")
    await runner.build()
    assert await runner.reset({"log": str(tmp_path / "closed")}) == "in a while"
    await runner.close()
    await executor.close()


async def test_processes_are_forked_anew_when_the_one_they_come_from_was_killed(
    tmp_path: Path,
) -> None:
    executor = make_executor(tmp_path)
    assert executor.host is not None
    first = executor.runner("first")
    await first.build()
    (nursery,) = children()
    (child,) = nursery.children()
    nursery.kill()
    wait_for_end(child)
    with pytest.raises(AgentError, match="process was ended by SIGKILL during reset"):
        await first.reset({"does": "play"})
    await first.close()
    second = executor.runner("second")
    await second.build()
    assert "0." in await second.reset({"does": "play", "log": str(tmp_path / "closed")})
    await second.close()
    await executor.close()


async def test_a_cancelled_run_closes_its_instances(tmp_path: Path) -> None:
    executor = make_executor(tmp_path, close_timeout=10.0)
    runner = executor.runner("r")
    await runner.build()
    await runner.reset({"does": "play", "log": str(tmp_path / "closed")})
    closing = asyncio.create_task(runner.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert len(closed(tmp_path)) == 1
    await executor.close()


def test_nothing_outlives_agentrl_when_it_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        dedent(
            f"""
            import asyncio, sys
            sys.path.insert(0, {str(Path(__file__).parent)!r})
            from pathlib import Path
            from test_process_env import make_executor, run

            folder = Path({str(tmp_path)!r})
            asyncio.run(run(make_executor(folder), folder, "sleep", "spin"))
            """
        )
    )
    process = subprocess.Popen([sys.executable, script])
    below: list[psutil.Process] = []
    while len(below) < 3:
        assert process.poll() is None
        time.sleep(0.05)
        below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_for_end(*below)


def test_the_whole_loop_of_an_episode_cannot_run_in_a_process(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text(
        "import agentrl as rl\nclass Loop(rl.AgentExecutor):\n"
        "    async def execute(self, example, llm): ...\n"
    )
    config = RolloutConfig(env_backend="process")
    with pytest.raises(UsageError, match=r"env_backend process is for environments, and Loop"):
        load_agent(path).make_executor(config, DataConfig())


def test_the_probe_before_a_run_builds_an_instance_in_a_process(tmp_path: Path) -> None:
    path = tmp_path / "agent.py"
    path.write_text(
        "import agentrl as rl\nclass Env(rl.AgentInstance):\n"
        "    def __init__(self):\n        import os; os._exit(5)\n"
    )
    with pytest.raises(AgentError, match="ended with status 5 during __init__"):
        load_agent(path).make_executor(RolloutConfig(env_backend="process"), DataConfig())


async def test_the_working_directory_does_not_replace_modules_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logging.py").write_text("raise KeyError('not the one of Python')")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    result = await run(make_executor(tmp_path / "elsewhere"), tmp_path, "play")
    assert result.num_completed == 1
