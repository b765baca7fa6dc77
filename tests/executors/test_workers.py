"""Several rollout processes: what comes of a run is what one process would have made of it.

Two of them, and a server of their own, are shared by most tests here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import torch
from transformers import PreTrainedModel

from agentrl.config import Config, RolloutConfig
from agentrl.engines.base import WeightSource
from agentrl.engines.factory import make_engine
from agentrl.engines.pool import EnginePool
from agentrl.errors import AgentError, EngineError, UsageError
from agentrl.executors.build import local_attempts
from agentrl.executors.groups import GroupRequest, RolloutResult
from agentrl.executors.scheduler import RolloutScheduler
from agentrl.executors.workers import process as process_module
from agentrl.executors.workers.attempts import ProcessAttempts
from agentrl.models.load import load_policy, load_tokenizer
from agentrl.plugin import load_agent
from agentrl.train.sampler import Sampler
from agentrl.types import StopReason

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAKE = Path(__file__).parents[1] / "engines" / "fake"
FAIL_FAST = {"fail_fast": True, "retry_pause": 0.5}
AGENT = """
import asyncio, ctypes, gc, logging, os, signal, sys, threading, time
from pathlib import Path
import agentrl as rl

class Odd:
    def __reduce__(self):
        return int, ("no number",)

class Env(rl.AgentInstance):
    async def reset(self, example):
        self.does, self.log = example["does"], Path(example["log"])
        self.note("begun")
        if self.does == "prompt":
            return "x" * 500
        if self.does == "log":
            logging.getLogger("env").warning("the board is odd")
        if self.does == "log badly":
            logging.getLogger("env").warning("%d pieces", "no number")
        if self.does == "odd":
            return [{"role": "user", "content": "go", "piece": Odd()}]
        return f"go {example['number']}"

    async def step(self, action):
        match self.does:
            case "raise":
                raise ValueError("no such move")
            case "raise once" if self.first_time():
                raise ValueError("no such move")
            case "wait":
                self.note("waits")
                await asyncio.Event().wait()
            case "hang once" if self.first_time():
                time.sleep(600)
            case "fork and die once" if self.first_time():
                if os.fork() == 0:
                    time.sleep(600)
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit in a task once" if self.first_time():
                threading.Thread(target=time.sleep, args=(600,)).start()
                await asyncio.create_task(self.exit())
            case "crash":
                ctypes.string_at(0)
        return rl.StepResult(
            observation="more",
            reward=float(len(action.text)),
            done=action.turn_index == 1,
            metrics={"pid": os.getpid(), "frozen": gc.get_freeze_count()},
        )

    async def close(self):
        self.note("closed")

    async def exit(self):
        sys.exit(4)

    def first_time(self):
        mark = self.log.with_name(f"{self.log.name}-{self.does}")
        if mark.exists():
            return False
        mark.touch()
        return True

    def note(self, what):
        with self.log.open("a") as log:
            print(what, file=log)
"""


def config_of(folder: Path, **rollout: Any) -> Config:
    agent = folder / "agent.py"
    agent.write_text(AGENT)
    engine = {
        "kind": "vllm",
        "transport": "gloo",
        "env": {"PYTHONPATH": str(FAKE), "OMP_NUM_THREADS": "1"},
        "extra": {"token_seconds": 0.002},
    }
    limits = {
        "max_tokens": 160,
        "max_new_tokens": 3,
        "temperature": 0.01,  # what is sampled does not depend on chance
        "logprobs": "sampler",
        "close_timeout": 2.0,
        "num_processes": 2,
    }
    return Config(agent=agent, engine=engine, rollout=limits | rollout)  # type: ignore[arg-type]


def model_of(config: Config, seed: int) -> PreTrainedModel:
    """A model that is sure of what it says, so that nothing is left to chance."""
    model = load_policy(config.model, seed)
    with torch.no_grad():
        model.model.norm.weight.mul_(100)
    return model


@dataclass
class Stage:
    """The server, its rollout processes, and where episodes leave notes."""

    config: Config
    pool: EnginePool
    attempts: ProcessAttempts

    def scheduler(self, *, local: bool = False, **rollout: Any) -> RolloutScheduler:
        settings = RolloutConfig(**({"retry_pause": 0.0, "max_tokens": 160} | rollout))
        if not local:
            return RolloutScheduler(self.attempts, settings)
        config = self.config
        executor = load_agent(config.agent).make_executor(config.rollout, config.data, probe=False)
        tokenizer = load_tokenizer(config.model)
        return RolloutScheduler(
            local_attempts(config, executor, self.pool, tokenizer, ()), settings
        )

    async def settled(self) -> None:
        """Until one process was found dead, and both are there again."""
        async with asyncio.timeout(120):
            await asyncio.sleep(0.2)
            while len(self.attempts.workers) < 2:  # noqa: ASYNC110 - nothing says when
                await asyncio.sleep(0.05)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    folder = tmp_path_factory.mktemp("workers")
    config = config_of(folder)
    model_of(config, 0).save_pretrained(folder / "model")
    load_tokenizer(config.model).save_pretrained(folder / "model")
    pool = make_engine(config, run_dir=folder, model_folder=folder / "model")
    assert isinstance(pool, EnginePool)
    attempts = ProcessAttempts(config, pool, ())
    try:
        await asyncio.gather(pool.start(), attempts.start())
        yield Stage(config, pool, attempts)
        processes = processes_of(attempts)
        await attempts.close()
        assert not [process for process in processes if process.is_running()]
    finally:
        await attempts.close()
        await pool.close()


def processes_of(attempts: ProcessAttempts) -> list[psutil.Process]:
    return [psutil.Process(worker.pid) for worker in attempts.workers]


def requests(log: Path, *does: str, members: int = 2) -> list[GroupRequest]:
    return [
        GroupRequest(
            f"{number:08d}",
            f"example-{number}",
            {"does": what, "log": str(log), "number": number},
            members,
        )
        for number, what in enumerate(does)
    ]


def noted(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def said(result: RolloutResult) -> list[Any]:
    """All of a result that does not depend on time or place."""
    return [
        [(group.group_id, group.example_id, group.rewards) for group in result.groups],
        [
            (
                *(t.rollout_id, t.group_id, t.example_id, t.stop_reason, t.reward, t.messages),
                [(s.token_ids.tolist(), s.weight_versions.tolist()) for s in t.sequences],
                [(s.response_mask.tolist(), s.turns) for s in t.sequences],
            )
            for t in result.outcomes
        ],
        *(result.num_completed, result.num_failed, result.num_retried, result.num_dropped_groups),
        [trajectory.rollout_id for trajectory in result.dropped],
        result.warnings,
    ]


async def test_the_result_is_that_of_one_process(stage: Stage, tmp_path: Path) -> None:
    results = []
    for local in (True, False):
        log = tmp_path / f"log-{local}"
        finished: list[str] = []
        result = await stage.scheduler(local=local).run(
            requests(log, "go", "raise once", "go", "raise", "go", members=3),
            lambda trajectory, finished=finished: finished.append(trajectory.rollout_id),
        )
        assert sorted(finished) == [t.rollout_id for t in result.outcomes]
        assert result.num_failed == {StopReason.ENV_ERROR: 7}  # 1, and 3 members twice
        assert noted(log).count("begun") == noted(log).count("closed") == 19
        results.append(result)
    one, two = results
    assert said(one) == said(two)
    pids = {t.metrics["pid"] for t in two.trajectories}
    assert pids == {process.pid for process in processes_of(stage.attempts)}
    assert {t.metrics["pid"] for t in one.trajectories} == {os.getpid()}
    for mine, theirs in zip(one.trajectories, two.trajectories, strict=True):
        assert theirs.sequences[0].logprobs == pytest.approx(
            mine.sequences[0].logprobs, abs=1e-4, nan_ok=True
        )
        assert theirs.timings.engine > 0


async def test_the_collector_of_a_process_leaves_alone_what_was_loaded(
    stage: Stage, tmp_path: Path
) -> None:
    result = await stage.scheduler().run(requests(tmp_path / "log", "go"))
    assert all(trajectory.metrics["frozen"] > 100_000 for trajectory in result.trajectories)


async def test_requests_are_counted_once_and_by_the_end_of_the_run(
    stage: Stage, tmp_path: Path
) -> None:
    stage.pool.stats()
    result = await stage.scheduler().run(requests(tmp_path / "log", *["go"] * 8))
    stats = stage.pool.stats()
    turns = [turn for t in result.trajectories for s in t.sequences for turn in s.turns]
    assert len(result.trajectories) == 16
    assert stats["requests"] == len(turns)
    assert stats["sampled_tokens"] == sum(turn.end - turn.start for turn in turns)
    assert "requests" not in stage.pool.stats()


async def test_all_processes_sample_from_new_weights_at_once(stage: Stage, tmp_path: Path) -> None:
    policy = model_of(stage.config, 1)
    for version in (5, 6):
        await stage.pool.update_weights(
            WeightSource(lambda: iter(policy.named_parameters()), version, live=True)
        )
        result = await stage.scheduler().run(requests(tmp_path / "log", *["go"] * 4))
        sequences = [s for t in result.trajectories for s in t.sequences]
        assert {int(v) for s in sequences for v in s.weight_versions[s.response_mask]} == {version}


async def test_an_update_in_the_middle_of_a_run_meets_no_request(
    stage: Stage, tmp_path: Path
) -> None:
    policy = model_of(stage.config, 0)
    run = asyncio.create_task(stage.scheduler().run(requests(tmp_path / "log", *["go"] * 16)))
    for version in (7, 8, 9):
        await asyncio.sleep(0.05)
        await stage.pool.update_weights(
            WeightSource(lambda: iter(policy.named_parameters()), version, live=True)
        )
    result = await run
    assert result.num_failed == {}
    for trajectory in result.trajectories:
        for sequence in trajectory.sequences:
            versions = sequence.weight_versions[sequence.response_mask].tolist()
            assert versions == sorted(versions)
            assert set(versions) <= {6, 7, 8, 9}


async def test_cancelling_a_run_closes_its_instances_and_leaves_the_processes(
    stage: Stage, tmp_path: Path
) -> None:
    log, before = tmp_path / "log", processes_of(stage.attempts)
    scheduler = stage.scheduler()
    run = asyncio.create_task(scheduler.run(requests(log, "wait", "wait", members=3)))
    other = asyncio.create_task(scheduler.run(requests(tmp_path / "other", "go")))
    async with asyncio.timeout(30):
        while noted(log).count("waits") < 6:  # noqa: ASYNC110 - another process says it
            await asyncio.sleep(0.02)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert noted(log).count("closed") == 6
    assert (await other).num_completed == 2
    assert processes_of(stage.attempts) == before


async def test_what_ends_a_run_in_one_process_ends_it_here_with_the_same_words(
    stage: Stage, tmp_path: Path
) -> None:
    for does, kind, words, rollout in (
        ("raise", AgentError, r"(?s)fail_fast is set.*in step.*no such move", FAIL_FAST),
        ("raise", AgentError, r"every one of the first 4 episodes failed .*env_error: 8", {}),
        ("prompt", UsageError, r"leaves none for an answer: raise rollout\.max_tokens", {}),
    ):
        messages = []
        for local in (True, False):
            log = tmp_path / f"log-{does}-{local}-{len(rollout)}"
            scheduler = stage.scheduler(local=local, max_concurrency=1, **rollout)
            with pytest.raises(kind, match=words) as caught:
                await scheduler.run(requests(log, does, does))
            assert noted(log).count("begun") == noted(log).count("closed")
            messages.append(str(caught.value))
        assert messages[0] == messages[1]


async def test_what_an_agent_logs_reaches_the_log_of_the_run(
    stage: Stage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = logging.getLogger("env")
    own.addHandler(caplog.handler)  # as a file's own handler: its process has one, too
    try:
        await stage.scheduler().run(requests(tmp_path / "log", "log", members=1))
        own.setLevel(logging.ERROR)
        await stage.scheduler().run(requests(tmp_path / "log", "log", members=1))
        await asyncio.sleep(0.05)
    finally:
        own.removeHandler(caplog.handler)
        own.setLevel(logging.NOTSET)
    assert [r.getMessage() for r in caplog.records if r.name == "env"] == ["the board is odd"]


async def test_a_log_message_that_is_wrong_in_itself_fails_no_episode(
    stage: Stage, tmp_path: Path
) -> None:
    result = await stage.scheduler().run(requests(tmp_path / "log", "log badly", members=1))
    assert result.num_failed == {}


class Odd:
    """Can be pickled, but not be made again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


@pytest.mark.parametrize("odd", [lambda: None, Odd()])
async def test_an_example_that_cannot_travel_is_named(
    stage: Stage, tmp_path: Path, odd: object
) -> None:
    request = GroupRequest("g", "e", {"does": odd, "log": "", "number": 0}, 1)
    before = processes_of(stage.attempts)
    with pytest.raises(AgentError, match=r"cannot travel .* set rollout\.num_processes 1"):
        await stage.scheduler().run([request])
    assert processes_of(stage.attempts) == before


async def test_an_episode_whose_result_cannot_travel_fails_alone(
    stage: Stage, tmp_path: Path
) -> None:
    before = processes_of(stage.attempts)
    result = await stage.scheduler().run(requests(tmp_path / "log", "odd", "go", members=1))
    (dropped,) = result.dropped
    assert "what came of an episode cannot travel between processes" in (dropped.error or "")
    assert [group.group_id for group in result.groups] == ["00000001"]
    assert processes_of(stage.attempts) == before


async def test_a_process_that_is_killed_is_replaced_and_its_episodes_run_again(
    stage: Stage, tmp_path: Path
) -> None:
    log, before = tmp_path / "log", {process.pid for process in processes_of(stage.attempts)}
    (engine,) = stage.pool.engines
    assert engine.server is not None
    (server,) = psutil.Process(engine.server.pid).children()
    server.suspend()  # so that all are in the middle of a request
    run = asyncio.create_task(stage.scheduler().run(requests(log, *["go"] * 4)))
    async with asyncio.timeout(30):
        while noted(log).count("begun") < 8:  # noqa: ASYNC110 - another process says it
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)
    os.kill(stage.attempts.workers[0].pid, signal.SIGKILL)
    await stage.settled()
    server.resume()
    result = await run
    assert [len(group.trajectories) for group in result.groups] == [2] * 4
    assert result.num_failed == {StopReason.ENV_ERROR: 4}
    assert result.num_retried == 4
    assert noted(log).count("begun") == 12
    assert len({process.pid for process in processes_of(stage.attempts)} & before) == 1
    # Nobody waits for the requests of the dead process.
    await asyncio.wait_for(stage.pool.pause("wait"), 30)
    await stage.pool.resume()
    assert (await stage.scheduler().run(requests(log, *["go"] * 4))).num_failed == {}


@pytest.mark.slow
async def test_an_agent_that_crashes_its_process_each_time_is_dropped_and_says_why(
    stage: Stage, tmp_path: Path
) -> None:
    scheduler = stage.scheduler(max_concurrency=1)
    result = await scheduler.run(requests(tmp_path / "log", "crash", "go", members=1))
    (dropped,) = result.dropped
    assert dropped.error == "the episode's rollout process was ended by SIGSEGV"
    assert result.num_failed == {StopReason.ENV_ERROR: 2}
    assert [group.group_id for group in result.groups] == ["00000001"]
    await stage.settled()


@pytest.mark.slow
@pytest.mark.parametrize("does", ["fork and die once", "exit in a task once"])
async def test_a_process_is_known_to_have_ended_whatever_its_agent_has_left_running(
    stage: Stage, tmp_path: Path, does: str
) -> None:
    scheduler = stage.scheduler(max_concurrency=1)
    run = scheduler.run(requests(tmp_path / "log", does, members=1))
    result = await asyncio.wait_for(run, 60)
    assert result.num_completed == 1
    assert result.num_retried == 1
    await stage.settled()
    family = psutil.Process().children(recursive=True)
    assert len([each for each in family if "agentrl.executors.workers" in str(each.cmdline())]) == 2


@pytest.mark.slow
async def test_a_process_finds_the_modules_that_agentrl_finds(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logging.py").write_text("raise KeyError('not the one of Python')")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "far_away.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "library")
    config = config_of(tmp_path / "library", num_processes=1)
    config.agent.write_text(f"import far_away\n{AGENT}")
    attempts = ProcessAttempts(config, stage.pool, ())
    await attempts.start()
    await attempts.close()


async def test_environments_in_processes_work_inside_a_rollout_process(
    stage: Stage, tmp_path: Path
) -> None:
    config = config_of(tmp_path, env_backend="process", num_processes=1)
    attempts = ProcessAttempts(config, stage.pool, ())
    await attempts.start()
    try:
        log = tmp_path / "log"
        scheduler = RolloutScheduler(attempts, config.rollout)
        result = await scheduler.run(requests(log, "go", "crash", "go"))
        assert result.num_completed == 4
        assert "SIGSEGV" in (result.dropped[0].error or "")
        assert len({t.metrics["pid"] for t in result.trajectories}) == 4
        family = psutil.Process(attempts.workers[0].pid)
        family_of = [family, *family.children(recursive=True)]
    finally:
        await attempts.close()
    assert not [process for process in family_of if process.is_running()]


@pytest.mark.slow
async def test_a_process_that_hangs_is_ended_and_its_other_episodes_run_again(
    stage: Stage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(process_module, "SLACK_SECONDS", 0.5)
    monkeypatch.setattr(process_module, "CANCEL_GRACE", 0.5)
    limits = {"episode_timeout": 2.0, "close_timeout": 0.5, "retry_pause": 0.0}
    config = config_of(tmp_path, num_processes=1, **limits)
    attempts = ProcessAttempts(config, stage.pool, ())
    await attempts.start()
    try:
        scheduler = RolloutScheduler(attempts, config.rollout)
        result = await scheduler.run(requests(tmp_path / "log", "go", "hang once", members=1))
    finally:
        await attempts.close()
    assert result.num_completed == 2
    assert result.num_failed == {StopReason.ENV_ERROR: result.num_retried}
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert errors == [
        "a rollout process was ended by SIGABRT, since it hung for long after an episode's time "
        "limit (code in `async def` must not block; where it did is said above): another takes its "
        "place"
    ]
    # Where it hung is among its last words.
    assert re.search(r'agent\.py", line \d+ in step', capfd.readouterr().err)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("raise KeyError('board')", UsageError, "importing the agent from .* raised KeyError"),
        ("import os; os._exit(3)", AgentError, "ended with status 3 before it was ready"),
    ],
)
async def test_a_process_that_cannot_start_ends_the_run(
    stage: Stage, tmp_path: Path, text: str, kind: type[Exception], words: str
) -> None:
    config = config_of(tmp_path)
    config.agent.write_text(text)
    attempts = ProcessAttempts(config, stage.pool, ())
    with pytest.raises(kind, match=words):
        await attempts.start()
    await attempts.close()
    assert attempts.workers == []


@pytest.mark.slow
@pytest.mark.parametrize("late", ["engine", "processes"])
async def test_what_has_started_beside_something_that_cannot_is_ended(
    tmp_path: Path, late: str
) -> None:
    config = config_of(tmp_path)
    if late == "engine":
        engine = config.engine.model_copy(update={"extra": {"cannot_sample": True}})
        config = config.model_copy(update={"engine": engine})
    model_of(config, 0).save_pretrained(tmp_path / "model")
    tokenizer = load_tokenizer(config.model)
    pool = make_engine(config, run_dir=tmp_path, model_folder=tmp_path / "model")
    executor = load_agent(config.agent).make_executor(config.rollout, config.data)
    if late == "processes":
        config.agent.write_text("import time; time.sleep(4); raise KeyError('board')")
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises((EngineError, UsageError), match=r"no kernel for this model|KeyError"):
        async with Sampler(config, executor, pool, tokenizer, None):
            pass
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.slow
async def test_a_process_that_cannot_be_replaced_ends_the_run(stage: Stage, tmp_path: Path) -> None:
    config = config_of(tmp_path, num_processes=1)
    attempts = ProcessAttempts(config, stage.pool, ())
    await attempts.start()
    try:
        config.agent.write_text("raise KeyError('board')")
        os.kill(attempts.workers[0].pid, signal.SIGKILL)
        with pytest.raises(UsageError, match="raised KeyError"):
            await RolloutScheduler(attempts, config.rollout).run(requests(tmp_path / "log", "go"))
    finally:
        await attempts.close()
