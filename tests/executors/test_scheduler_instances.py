"""The scheduler with real environments: they overlap, fail alone, and are closed exactly once."""

import asyncio
import subprocess
import sys
import threading
import time
from collections import Counter
from textwrap import dedent

import pytest

from agentrl.chat import ChatFormat
from agentrl.config import RolloutConfig
from agentrl.engines.scripted import ScriptedEngine
from agentrl.executors.attempts import LocalAttempts, Member
from agentrl.executors.base import AgentInstance
from agentrl.executors.groups import GroupRequest, RolloutResult
from agentrl.executors.multi_turn import MultiTurnExecutor
from agentrl.executors.scheduler import RolloutScheduler
from agentrl.models.tiny import build_tiny_tokenizer
from agentrl.types import Action, Example, SamplingParams, StepResult, StopReason

CHAT = ChatFormat(build_tiny_tokenizer())


async def run(
    instance_class: type[AgentInstance],
    members: int,
    engine: ScriptedEngine | None = None,
    **rollout,
) -> RolloutResult:
    config = RolloutConfig(**rollout)
    scheduler = RolloutScheduler.local(
        MultiTurnExecutor(instance_class, config),
        engine or ScriptedEngine([[10, 11]]),
        CHAT,
        SamplingParams(max_new_tokens=8),
        config,
    )
    return await scheduler.run([GroupRequest("g", "e", {"question": "?"}, members)])


class Counted(AgentInstance):
    """Counts what became of its instances; a subclass begins with fresh counters."""

    built = 0
    closed: Counter[int]

    def __init_subclass__(cls) -> None:
        cls.built = 0
        cls.closed = Counter()

    def __init__(self) -> None:
        cls = type(self)
        self.number = cls.built
        cls.built += 1

    def reset(self, example: Example) -> str:
        return example["question"]

    def step(self, action: Action) -> StepResult:
        return StepResult(reward=float(self.number), done=True)

    def close(self) -> None:
        self.closed[self.number] += 1


async def test_eight_environments_that_block_overlap():
    # oumi#2571: eight environments that sleep 1 s take about 1 s.
    lock = threading.Lock()
    sleeping = [0, 0]

    class Sleeps(Counted):
        def step(self, action: Action) -> StepResult:
            with lock:
                sleeping[0] += 1
                sleeping[1] = max(sleeping)
            time.sleep(0.3)
            with lock:
                sleeping[0] -= 1
            return super().step(action)

    result = await run(Sleeps, 8)
    assert sleeping[1] == 8
    assert result.num_completed == 8


async def test_one_hung_step_leaves_the_other_seven_alone():
    release = threading.Event()

    class FourthHangs(Counted):
        def step(self, action: Action) -> StepResult:
            if self.number >= 8 or self.number == 3:
                release.wait()
            return super().step(action)

    result = await run(FourthHangs, 8, step_timeout=0.2)
    release.set()
    assert result.num_completed == 7
    assert result.num_failed == {StopReason.TIMEOUT: 2}
    assert FourthHangs.built == 9
    assert "FourthHangs.step did not return within 0.2 s" in result.dropped[0].error
    assert "rollout.step_timeout" in result.dropped[0].error


async def test_a_failed_member_is_run_again_with_a_fresh_instance():
    class FirstBreaks(Counted):
        def step(self, action: Action) -> StepResult:
            if self.number == 0:
                raise ConnectionError("simulator gone")
            return super().step(action)

    result = await run(FirstBreaks, 1)
    assert result.groups[0].rewards == (1.0,)
    assert result.num_failed == {StopReason.ENV_ERROR: 1}
    assert FirstBreaks.closed == {0: 1, 1: 1}


async def test_a_constructor_that_raises_fails_its_episode_only():
    class ThirdCannot(Counted):
        def __init__(self) -> None:
            super().__init__()
            if self.number == 2:
                raise OSError("no port left")

    result = await run(ThirdCannot, 4, max_retries=0)
    assert result.num_completed == 3
    assert "OSError: no port left" in result.dropped[0].error
    assert set(ThirdCannot.closed.values()) == {1}
    assert 2 not in ThirdCannot.closed


async def test_a_close_that_raises_does_not_change_the_result(caplog):
    class BadClose(Counted):
        def close(self) -> None:
            super().close()
            raise OSError("already gone")

    result = await run(BadClose, 12)
    assert sorted(result.groups[0].rewards) == [float(number) for number in range(12)]
    assert result.num_failed == {}
    # In full once, then a line where the count reaches a power of ten.
    first, tenth = [record for record in caplog.records if record.levelname == "WARNING"]
    assert caplog.text.count("OSError: already gone") == 1
    assert first.exc_info is not None
    assert tenth.getMessage() == "close has raised or hung in 10 episodes"


@pytest.mark.parametrize("blocking", [True, False])
async def test_every_instance_is_closed_once_when_the_run_is_cancelled(blocking):
    # OpenEnv#991, prime-rl#2175.
    release = threading.Event()

    class Threaded(Counted):
        def step(self, action: Action) -> StepResult:
            release.wait(1)
            return super().step(action)

    class Coroutines(Counted):
        async def step(self, action: Action) -> StepResult:
            await asyncio.Event().wait()
            return super().step(action)

        async def close(self) -> None:
            await asyncio.sleep(0)
            super().close()

    instance_class = Threaded if blocking else Coroutines
    all_sampled = asyncio.Event()

    def script(*_: object) -> list[int]:
        if len(engine.calls) == 4:
            all_sampled.set()
        return [10, 11]

    engine = ScriptedEngine(script)
    running = asyncio.create_task(run(instance_class, 4, engine))
    await all_sampled.wait()
    running.cancel()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert instance_class.closed == dict.fromkeys(range(4), 1)


async def test_an_attempt_that_is_cancelled_again_and_again_still_ends_after_its_instance():
    stepping, closing, closed = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Slow(AgentInstance):
        async def reset(self, example: Example) -> str:
            return "go"

        async def step(self, action: Action) -> StepResult:
            stepping.set()
            await asyncio.Event().wait()
            raise AssertionError

        async def close(self) -> None:
            closing.set()
            for _ in range(20):
                await asyncio.sleep(0)
            closed.set()

    config, params = RolloutConfig(), SamplingParams(max_new_tokens=8)
    executor, engine = MultiTurnExecutor(Slow, config), ScriptedEngine([[10, 11]])
    attempts = LocalAttempts(executor, engine, CHAT, params, config)
    member = Member(GroupRequest("g", "e", {}, 1), "g-000")
    attempt = asyncio.create_task(attempts.run(member, 0))
    await stepping.wait()
    attempt.cancel()
    await closing.wait()
    for _ in range(3):
        attempt.cancel()
        await asyncio.sleep(0)
    assert not closed.is_set()
    with pytest.raises(asyncio.CancelledError):
        await attempt
    assert closed.is_set()


def test_every_instance_is_closed_once_when_the_user_presses_ctrl_c(tmp_path):
    script = tmp_path / "interrupted.py"
    script.write_text(
        dedent(
            """
            import asyncio, os, signal
            import agentrl as rl
            from agentrl.chat import ChatFormat
            from agentrl.config import RolloutConfig
            from agentrl.engines.scripted import ScriptedEngine
            from agentrl.executors.groups import GroupRequest
            from agentrl.executors.multi_turn import MultiTurnExecutor
            from agentrl.executors.scheduler import RolloutScheduler
            from agentrl.models.tiny import build_tiny_tokenizer

            waiting = []

            class Waits(rl.AgentInstance):
                def reset(self, example):
                    return "?"

                async def step(self, action):
                    waiting.append(self)
                    if len(waiting) == 3:
                        os.kill(os.getpid(), signal.SIGINT)
                    await asyncio.Event().wait()

                def close(self):
                    # Not print: two threads' parts of a line may mix.
                    os.write(1, f"closed {waiting.index(self)}\\n".encode())

            config = RolloutConfig()
            scheduler = RolloutScheduler.local(
                MultiTurnExecutor(Waits, config), ScriptedEngine([[10]]),
                ChatFormat(build_tiny_tokenizer()), rl.SamplingParams(max_new_tokens=8), config,
            )
            try:
                asyncio.run(scheduler.run([GroupRequest("g", "e", {}, 3)]))
            except KeyboardInterrupt:
                print("interrupted")
            """
        )
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60, check=True
    )
    assert sorted(done.stdout.splitlines()) == ["closed 0", "closed 1", "closed 2", "interrupted"]


async def test_a_sibling_is_still_sampled_at_1_when_another_sets_temperature_0():
    # OpenRLHF: siblings shared one sampling-parameter object.
    class FirstIsGreedy(Counted):
        def step(self, action: Action) -> StepResult:
            if action.turn_index == 1:
                return super().step(action)
            return StepResult("again", sampling={"temperature": 0.0} if self.number == 0 else {})

    engine = ScriptedEngine([[10, 11]])
    await run(FirstIsGreedy, 2, engine, max_concurrency=1)
    assert [call.params.temperature for call in engine.calls] == [1.0, 0.0, 1.0, 1.0]


async def test_an_answer_cut_by_the_limit_is_truncated_in_the_result_and_warned_of():
    class Scores(Counted):
        async def step(self, action: Action) -> StepResult:
            return StepResult("again", reward=float(action.finish_reason == "length"))

    result = await run(Scores, 2, ScriptedEngine([[10] * 9]))
    assert [t.stop_reason for t in result.trajectories] == [StopReason.MAX_TOKENS] * 2
    assert all(t.truncated and t.reward == 1.0 for t in result.trajectories)
    assert any("raise rollout.max_new_tokens" in warning for warning in result.warnings.values())
