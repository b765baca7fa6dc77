"""What a run does about failures: pauses that grow, fail fast, and an end when nothing succeeds."""

import asyncio

import pytest
from test_scheduler import Loop, make, requests

from agentrl.config import RolloutConfig
from agentrl.engines.scripted import ScriptedEngine
from agentrl.errors import AgentError, EngineError
from agentrl.executors.failures import LONGEST_PAUSE, FailurePolicy
from agentrl.executors.llm import LLM
from agentrl.types import Example, StopReason


def test_pauses_double_up_to_a_minute_and_the_last_attempt_has_none() -> None:
    policy = FailurePolicy.of(RolloutConfig(max_retries=3, retry_pause=2.0))
    assert [policy.pause(attempt) for attempt in range(4)] == [2.0, 4.0, 8.0, None]
    patient = FailurePolicy.of(RolloutConfig(max_retries=10_000))
    assert patient.pause(9_999) == LONGEST_PAUSE == 60.0


async def test_attempts_are_kept_apart_by_their_pauses() -> None:
    times: list[float] = []

    async def fail(example: Example, llm: LLM) -> None:
        if llm.rollout_id.endswith("1"):
            times.append(asyncio.get_running_loop().time())
            raise OSError("no port left")

    result = await make(Loop(fail), max_retries=2, retry_pause=0.02).run(requests(1, 2))
    assert result.num_retried == 2
    assert times[1] - times[0] >= 0.02
    assert times[2] - times[1] >= 0.04


async def test_fail_fast_ends_the_run_at_the_first_failed_attempt_and_says_where() -> None:
    async def fourth_fails(example: Example, llm: LLM) -> None:
        if llm.rollout_id.endswith("3"):
            raise KeyError("board")

    executor = Loop(fourth_fails)
    run = make(executor, fail_fast=True, retry_pause=0.5, max_concurrency=1).run(requests(3, 4))
    with pytest.raises(AgentError, match=r"(?s)rollout\.fail_fast is set.*in fourth_fails.*board"):
        await run
    assert list(executor.attempts.values()) == [1, 1, 1, 1]


async def test_an_engine_that_dies_for_good_ends_a_run_that_went_well_before() -> None:
    engine = ScriptedEngine([[7]], failures=range(8, 10_000))
    run = make(Loop(), engine, max_retries=0, max_consecutive_failures=3, max_concurrency=4)
    # Others of the 4 that run at once may have failed too when the run is told of the seventh.
    message = r"^([789]|10) episodes in a row, after 8 that completed, failed .* the engine"
    with pytest.raises(EngineError, match=message):
        await run.run(requests(100, 4))


async def test_failures_with_successes_between_them_never_end_a_run() -> None:
    async def all_but_every_third_fail(example: Example, llm: LLM) -> None:
        if example["number"] % 3:
            raise RuntimeError("x")

    run = make(Loop(all_but_every_third_fail), max_retries=0, max_consecutive_failures=3)
    result = await run.run(requests(90, 1))
    assert result.num_completed == 30
    assert result.num_failed == {StopReason.ENV_ERROR: 60}
