"""The scheduler: groups by id, typed failures, fresh retries, and no way to wait for ever."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from agentrl.chat import ChatFormat
from agentrl.config import RolloutConfig
from agentrl.engines.scripted import ScriptedEngine
from agentrl.errors import (
    AgentError,
    AgentRLError,
    AgentTimeoutError,
    ContextOverflowError,
    EngineError,
    UsageError,
)
from agentrl.executors import attempts as attempts_module
from agentrl.executors.base import AgentExecutor
from agentrl.executors.groups import GroupRequest, spread_warning
from agentrl.executors.llm import LLM
from agentrl.executors.scheduler import RolloutScheduler
from agentrl.models.tiny import build_tiny_tokenizer
from agentrl.types import Example, Observation, SamplingParams, StopReason, Trajectory

SAMPLING = SamplingParams(max_new_tokens=4, temperature=1.0)
CHAT = ChatFormat(build_tiny_tokenizer())


class Loop(AgentExecutor):
    """One engine call, then what the test wants to happen in the episode."""

    def __init__(self, then: Callable[[Example, LLM], Awaitable[object]] | None = None) -> None:
        self.then = then
        self.attempts: Counter[str] = Counter()

    async def execute(self, example: Example, llm: LLM) -> Trajectory:
        self.attempts[llm.rollout_id] += 1
        conversation = llm.conversation(Observation("go"))
        generation = await llm.generate(conversation.token_ids)
        conversation.take(generation)
        reward = float(generation.token_ids[0])
        if self.then is not None:
            changed = await self.then(example, llm)
            if isinstance(changed, Trajectory | float):
                reward = changed
        if isinstance(reward, Trajectory):
            return reward
        return llm.trajectory(None, reward=reward, stop_reason=StopReason.DONE)


def requests(groups: int, members: int) -> list[GroupRequest]:
    return [
        GroupRequest(f"{group:08d}", f"example-{group}", {"number": group}, members)
        for group in range(groups)
    ]


def make(executor: AgentExecutor, engine: ScriptedEngine | None = None, **rollout):
    rollout = {"retry_pause": 0.0} | rollout
    return RolloutScheduler.local(
        executor,
        engine or ScriptedEngine([[7]]),
        CHAT,
        SAMPLING,
        RolloutConfig(**rollout),
        seed=5,
    )


async def test_groups_are_formed_by_id_whatever_the_order_of_completion():
    # Prompts [p1, p2, p1, p2] cut as [p1, p1, p2, p2] (prime-rl#600); rllm#605.
    generator = random.Random(0)
    engine = ScriptedEngine(
        lambda prompt, params, rollout_id: [10 + int(rollout_id.split("-")[0])],
        latency=lambda rollout_id: generator.random() * 0.02,
    )
    finished = []
    result = await make(Loop(), engine).run(requests(6, 4), finished.append)
    assert [trajectory.rollout_id for trajectory in finished] != sorted(
        trajectory.rollout_id for trajectory in finished
    )
    assert [group.group_id for group in result.groups] == [f"{g:08d}" for g in range(6)]
    for number, group in enumerate(result.groups):
        assert [t.rollout_id for t in group.trajectories] == [
            f"{number:08d}-{member:03d}" for member in range(4)
        ]
        assert {t.example_id for t in group.trajectories} == {f"example-{number}"}
        assert group.rewards == (10.0 + number,) * 4


async def test_the_result_does_not_depend_on_timing():
    def script(prompt, params, rollout_id):
        return [10 + params.seed % 80, 10 + int(rollout_id[-3:])]

    async def sample(jitter: int, concurrency: int):
        generator = random.Random(jitter)
        engine = ScriptedEngine(script, latency=lambda rollout_id: generator.random() * 0.01)

        async def fail_once(example: Example, llm: LLM) -> None:
            if llm.rollout_id.endswith("1") and executor.attempts[llm.rollout_id] == 1:
                raise RuntimeError("once")

        executor = Loop(fail_once)
        result = await make(executor, engine, max_concurrency=concurrency).run(requests(4, 3))
        assert result.num_retried == 4
        return [
            (t.rollout_id, t.reward, t.sequences[-1].token_ids.tolist())
            for t in result.trajectories
        ]

    assert await sample(1, 12) == await sample(2, 5)


async def test_at_most_max_concurrency_episodes_are_in_flight_and_each_is_a_participant():
    seen = []
    engine = ScriptedEngine(lambda *call: seen.append(engine.participants) or [7], latency=0.001)
    await make(Loop(), engine, max_concurrency=3).run(requests(4, 2))
    assert engine.max_in_flight == 3
    assert max(seen) == 3
    assert engine.participants == 0


async def test_all_participants_are_announced_before_the_first_call():
    seen = []
    engine = ScriptedEngine(lambda *call: seen.append(engine.participants) or [7])
    await make(Loop(), engine, max_concurrency=8).run(requests(2, 4))
    assert seen[0] == 8


async def test_one_environment_raises_and_the_other_seven_complete():
    # SkyRL#1613: it is retried with a fresh instance, then dropped from its group and counted.
    async def seventh_fails(example: Example, llm: LLM) -> None:
        if llm.rollout_id.endswith("006"):
            raise RuntimeError("the simulator is gone")

    executor = Loop(seventh_fails)
    result = await make(executor, max_retries=1).run(requests(1, 8))
    assert len(result.groups[0].trajectories) == 7
    assert result.num_completed == 7
    assert result.num_failed == {StopReason.ENV_ERROR: 2}
    assert result.num_retried == 1
    assert executor.attempts["00000000-006"] == 2
    (dropped,) = result.dropped
    assert dropped.reward is None
    assert dropped.stop_reason is StopReason.ENV_ERROR
    assert "RuntimeError: the simulator is gone" in dropped.error
    assert "in seventh_fails" in dropped.error
    assert any("1 episodes failed every attempt" in warning for warning in result.warnings.values())


async def test_a_retry_keeps_the_rollout_id_and_changes_the_seed():
    engine = ScriptedEngine([[7]], failures={0})
    result = await make(Loop(), engine).run(requests(1, 1))
    assert [call.rollout_id for call in engine.calls] == ["00000000-000"] * 2
    assert len({call.params.seed for call in engine.calls}) == 2
    assert result.trajectories[0].rollout_id == "00000000-000"


async def test_an_engine_outage_is_never_a_reward_and_failed_attempts_do_not_count_as_completed():
    # UniRL#214; agent-lightning#355 counted 33 of 32.
    engine = ScriptedEngine([[7]], failures={3, 5})
    result = await make(Loop(), engine, max_concurrency=1).run(requests(4, 8))
    assert result.num_completed == 32
    assert result.num_failed == {StopReason.ENGINE_ERROR: 2}
    assert result.num_retried == 2
    assert {reward for group in result.groups for reward in group.rewards} == {7.0}


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("x"), StopReason.ENV_ERROR),
        (SystemExit(1), StopReason.ENV_ERROR),
        (EngineError("x"), StopReason.ENGINE_ERROR),
        (ContextOverflowError("the loop did not count"), StopReason.ENV_ERROR),
        (TimeoutError("x"), StopReason.TIMEOUT),
        (AgentTimeoutError("x"), StopReason.TIMEOUT),
        (asyncio.CancelledError("x"), StopReason.CANCELLED),
    ],
)
async def test_each_failure_has_its_kind_and_keeps_its_traceback(error, kind):
    async def fail(example: Example, llm: LLM) -> None:
        if llm.rollout_id.endswith("1"):
            raise error

    result = await make(Loop(fail), max_retries=0).run(requests(1, 2))
    (dropped,) = result.dropped
    assert dropped.stop_reason is kind
    assert "Traceback" in dropped.error
    assert "in fail" in dropped.error


async def test_an_engine_error_behind_the_agents_own_is_the_engines():
    async def wrap(example: Example, llm: LLM) -> None:
        if llm.rollout_id.endswith("1"):
            raise RuntimeError("my agent says") from EngineError("server gone")

    result = await make(Loop(wrap), max_retries=0).run(requests(1, 2))
    assert result.num_failed == {StopReason.ENGINE_ERROR: 1}


async def test_an_episode_that_does_not_end_times_out_and_says_where_it_hung():
    closed = []

    async def hang(example: Example, llm: LLM) -> None:
        if llm.rollout_id.endswith("1"):
            try:
                await asyncio.Event().wait()
            finally:
                closed.append(llm.rollout_id)

    run = make(Loop(hang), max_retries=0, episode_timeout=0.05).run(requests(1, 2))
    result = await asyncio.wait_for(run, 10)
    (dropped,) = result.dropped
    assert dropped.stop_reason is StopReason.TIMEOUT
    assert "rollout.episode_timeout (0.05 s)" in dropped.error
    assert "in hang" in dropped.error
    assert closed == ["00000000-001"]
    assert result.num_completed == 1


async def test_an_episode_that_swallows_its_cancellation_is_left_behind(monkeypatch, caplog):
    monkeypatch.setattr(attempts_module, "CANCEL_GRACE", 0.0)
    release = asyncio.Event()

    async def stubborn(example: Example, llm: LLM) -> None:
        while llm.rollout_id.endswith("1") and not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    run = make(Loop(stubborn), max_retries=0, episode_timeout=0.05, close_timeout=0.05)
    result = await run.run(requests(1, 2))
    assert result.num_failed == {StopReason.TIMEOUT: 1}
    assert "must let asyncio.CancelledError pass" in caplog.text
    release.set()
    await asyncio.sleep(0)


async def test_a_trajectory_that_says_it_failed_is_a_failed_attempt():
    async def timeout_once(example: Example, llm: LLM) -> Trajectory | None:
        if executor.attempts[llm.rollout_id] > 1:
            return None
        return llm.trajectory(None, reward=None, stop_reason=StopReason.TIMEOUT)

    executor = Loop(timeout_once)
    result = await make(executor).run(requests(1, 1))
    assert result.num_completed == 1
    assert result.num_failed == {StopReason.TIMEOUT: 1}


async def test_an_executor_that_returns_something_else_is_told_what_to_return():
    class Wrong(Loop):
        async def execute(self, example: Example, llm: LLM):
            return 1.0

    with pytest.raises(AgentError, match=r"returned a float: return llm\.trajectory"):
        await make(Wrong()).run(requests(1, 2))


async def test_a_group_with_too_few_scored_members_is_dropped_and_counted():
    async def outcome(example: Example, llm: LLM) -> Trajectory | None:
        if example["number"] == 0 and not llm.rollout_id.endswith("0"):
            raise RuntimeError("x")
        if example["number"] == 1 and not llm.rollout_id.endswith("0"):
            return llm.trajectory(None, reward=None, stop_reason=StopReason.DONE)
        return None

    run = make(Loop(outcome), min_group_size=2, max_retries=0)
    result = await run.run(requests(3, 3))
    assert [group.group_id for group in result.groups] == ["00000002"]
    assert result.num_dropped_groups == 2
    assert len(result.dropped) == 2
    assert result.num_completed == 7
    # The writer and an evaluation see all nine all the same.
    assert [outcome.rollout_id for outcome in result.outcomes] == [
        rollout_id for request in requests(3, 3) for rollout_id in request.rollout_ids()
    ]


async def test_when_every_episode_fails_the_run_ends_with_the_first_traceback():
    async def fail(example: Example, llm: LLM) -> None:
        raise KeyError("board")

    executor = Loop(fail)
    with pytest.raises(AgentError, match=r"(?s)first 32 episodes failed .*KeyError: 'board'") as e:
        await make(executor, max_concurrency=4).run(requests(100, 8))
    # Only the frames of this file: its executor's, and what that called.
    files = [line for line in str(e.value).splitlines() if line.startswith("  File ")]
    assert [__file__ in line for line in files] == [True, True]
    assert len(executor.attempts) < 40


async def test_when_a_small_first_batch_fails_whole_the_run_ends_too():
    engine = ScriptedEngine([[7]], failures=range(100))
    with pytest.raises(EngineError, match=r"first 2 episodes failed .* correct the engine"):
        await make(Loop(), engine).run(requests(1, 2))


async def test_a_bad_batch_after_a_good_one_is_counted_and_does_not_end_the_run():
    engine = ScriptedEngine([[7]], failures=range(2, 100))
    run = make(Loop(), engine, max_retries=0)
    await run.run(requests(1, 2))
    result = await run.run(requests(1, 2))
    assert result.groups == ()
    assert result.num_dropped_groups == 1
    assert result.num_failed == {StopReason.ENGINE_ERROR: 2}


async def test_a_usage_error_inside_an_episode_ends_the_run_and_closes_the_others():
    closed = []

    async def first_is_wrong(example: Example, llm: LLM) -> None:
        if llm.rollout_id.endswith("0"):
            await asyncio.sleep(0.01)
            raise UsageError("rollout.max_tokens is too small")
        try:
            await asyncio.Event().wait()
        finally:
            closed.append(llm.rollout_id)

    with pytest.raises(UsageError, match=r"rollout\.max_tokens"):
        await asyncio.wait_for(make(Loop(first_is_wrong)).run(requests(1, 4)), 10)
    assert len(closed) == 3


async def test_cancelling_the_run_closes_every_episode_first():
    # What Ctrl-C does (OpenEnv#991, prime-rl#2175).
    open_episodes = set()
    all_open = asyncio.Event()

    async def hang(example: Example, llm: LLM) -> None:
        open_episodes.add(llm.rollout_id)
        if len(open_episodes) == 8:
            all_open.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            open_episodes.remove(llm.rollout_id)

    engine = ScriptedEngine([[7]])
    run = asyncio.create_task(make(Loop(hang), engine).run(requests(2, 4)))
    await all_open.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert open_episodes == set()
    assert engine.participants == 0


async def test_a_worker_that_dies_is_an_error_and_not_a_wait_for_ever():
    # SkyRL#1173, NeMo-RL#3488.
    hanging = asyncio.Event()

    async def hang(example: Example, llm: LLM) -> None:
        hanging.set()
        await asyncio.Event().wait()

    before = asyncio.all_tasks()
    run = asyncio.create_task(make(Loop(hang)).run(requests(1, 2)))
    await hanging.wait()
    worker = next(
        task
        for task in asyncio.all_tasks() - before
        if task.get_coro().__qualname__ == "RolloutScheduler._work"
    )
    worker.cancel()
    with pytest.raises(AgentRLError, match="a rollout worker was cancelled from outside"):
        await asyncio.wait_for(run, 5)
    assert asyncio.all_tasks() == before


async def test_an_error_of_the_callback_ends_the_run():
    def full_disk(trajectory: Trajectory) -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        await asyncio.wait_for(make(Loop()).run(requests(2, 2), full_disk), 5)


async def test_overrides_of_one_episode_do_not_reach_its_sibling():
    # OpenRLHF: siblings shared one sampling-parameter object.
    class Greedy(Loop):
        async def execute(self, example: Example, llm: LLM) -> Trajectory:
            override = {"temperature": 0.0} if llm.rollout_id.endswith("000") else {}
            await llm.generate([1], **override)
            await llm.generate([1, 2])
            return llm.trajectory(None, reward=0.0, stop_reason=StopReason.DONE)

    engine = ScriptedEngine([[7]])
    await make(Greedy(), engine, max_concurrency=1).run(requests(1, 2))
    assert [call.params.temperature for call in engine.calls] == [0.0, 1.0, 1.0, 1.0]


async def test_an_agent_that_changes_its_example_does_not_change_its_siblings():
    seen = []

    async def change(example: Example, llm: LLM) -> None:
        seen.append(list(example["cards"]))
        example["cards"].pop()

    example = {"cards": [1, 2]}
    await make(Loop(change)).run([GroupRequest("g", "e", example, 3)])
    assert seen == [[1, 2]] * 3
    assert example == {"cards": [1, 2]}


async def test_a_batch_in_which_every_answer_is_cut_is_warned_of():
    # trl#5697: a default of 256 tokens silently cut every answer.
    cut = await make(Loop(), ScriptedEngine([[10] * 5])).run(requests(2, 2))
    assert any("raise rollout.max_new_tokens" in warning for warning in cut.warnings.values())
    one_whole = ScriptedEngine(lambda p, s, r: [10] if r.endswith("1-001") else [10] * 5)
    whole = await make(Loop(), one_whole).run(requests(2, 2))
    assert not any("rollout.max_new_tokens" in warning for warning in whole.warnings.values())


async def test_groups_without_spread_are_what_a_group_estimator_learns_nothing_from():
    same = await make(Loop(), ScriptedEngine([[7]])).run(requests(2, 2))
    assert "no group has any spread of rewards" in spread_warning(same.groups)
    one_group = ScriptedEngine(lambda p, s, r: [9] if r.endswith("1-001") else [7])
    spread = await make(Loop(), one_group).run(requests(2, 2))
    assert spread_warning(spread.groups) is None
    alone = await make(Loop(), ScriptedEngine([[7]])).run(requests(2, 1))
    assert spread_warning(alone.groups) is None


async def test_a_batch_whose_task_scores_are_all_equal_is_warned_of_although_rewards_differ():
    async def scored(example, llm):
        reward = float(llm.rollout_id.endswith("1"))
        return llm.trajectory(None, reward=reward, score=0.5, stop_reason=StopReason.DONE)

    result = await make(Loop(scored)).run(requests(2, 2))
    assert "no group has any spread of scores" in spread_warning(result.groups)


async def test_group_ids_must_be_distinct():
    with pytest.raises(ValueError, match="group ids must be distinct"):
        await make(Loop()).run(requests(1, 1) * 2)


async def test_no_requests_give_an_empty_result():
    result = await make(Loop()).run([])
    assert result.groups == ()
    assert result.num_completed == 0


async def test_the_counters_have_the_names_of_the_log():
    engine = ScriptedEngine([[7]], failures={0})
    result = await make(Loop(), engine).run(requests(1, 2))
    metrics = result.metrics()
    assert metrics["rollout/completed"] == 2.0
    assert metrics["rollout/failed"] == metrics["rollout/failed_engine_error"] == 1.0
    assert metrics["rollout/retried"] == 1.0
    assert metrics["rollout/dropped_members"] == 0.0
    assert result.trajectories[0].timings.queue > 0


def test_member_ids_sort_in_order_also_beyond_a_thousand():
    ids = GroupRequest("g", "e", {}, 1001).rollout_ids()
    assert ids == sorted(ids)
    assert len(set(ids)) == 1001


async def test_logprobs_are_asked_for_on_a_share_of_the_episodes_that_the_rollout_id_chooses():
    engine = ScriptedEngine([[5, 1]])

    async def sample(share: float) -> dict[str, bool]:
        scheduler = RolloutScheduler.local(
            Loop(), engine, CHAT, SAMPLING, RolloutConfig(), logprobs_share=share
        )
        result = await scheduler.run(requests(50, 8))
        return {t.rollout_id: t.sequences[0].logprobs is not None for t in result.outcomes}

    few, same, more = await sample(0.2), await sample(0.2), await sample(0.4)
    assert few == same
    assert 60 <= sum(few.values()) <= 100  # of 400: 80, within two and a half standard deviations
    assert all(more[rollout_id] for rollout_id, asked in few.items() if asked)
    assert set((await sample(1.0)).values()) == {True}
    assert set((await sample(0.0)).values()) == {False}
