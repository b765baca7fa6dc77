"""The loop of an episode: who ends it, what it is worth, and what it never does."""

from __future__ import annotations

import asyncio
import logging
import threading

import numpy as np
import pytest
from episodes import CHAT, make_llm, play, speaking

from agentrl import (
    AgentError,
    AgentInstance,
    EngineError,
    Observation,
    StepResult,
    StopReason,
    UsageError,
)
from agentrl.config import RolloutConfig
from agentrl.errors import AgentTimeoutError
from agentrl.executors.multi_turn import MultiTurnExecutor
from agentrl.executors.single_turn import SingleTurnAgent


class Guess(AgentInstance):
    """Ends when the policy says 42."""

    feedback = "The number is higher."

    async def reset(self, example):
        return "Guess."

    async def step(self, action):
        right = action.text == "42"
        return StepResult(observation=self.feedback, reward=float(right), done=right)


async def test_an_episode_ends_when_the_environment_says_so() -> None:
    trajectory = await play(Guess, speaking("7", "42"))
    assert trajectory.stop_reason is StopReason.DONE
    assert (trajectory.reward, trajectory.score, trajectory.num_turns) == (1.0, 1.0, 2)
    (sequence,) = trajectory.sequences
    assert [turn.reward for turn in sequence.turns] == [0.0, 1.0]
    assert [message["role"] for message in trajectory.messages] == [
        "user", "assistant", "user", "assistant",
    ]  # fmt: skip
    assert not trajectory.truncated


async def test_the_first_observation_is_what_the_policy_sees() -> None:
    """TRL#6067: the first observation of reset was thrown away."""
    engine = speaking("42")
    await play(Guess, engine)
    assert CHAT.decode(engine.calls[0].token_ids).startswith("<|im_start|>user\nGuess.")


@pytest.mark.parametrize(
    ("returned", "seen"),
    [
        ("Guess.", ["Guess."]),
        (("Guess.", {"seed": 1}), ["Guess."]),
        (({"role": "user", "content": "Guess."}, {"seed": 1}), ["Guess."]),
        ({"observation": "Guess."}, ["Guess."]),
        ({"role": "user", "content": "Guess."}, ["Guess."]),
        ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Guess."}],
         ["Be brief.", "Guess."]),
        (({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Guess."}),
         ["Be brief.", "Guess."]),
    ],
)  # fmt: skip
async def test_no_form_of_the_first_observation_is_lost(returned, seen) -> None:
    """TRL#6067, whatever reset returns; a tuple of two messages is not Gymnasium's."""

    class Form(Guess):
        async def reset(self, example):
            return returned

    trajectory = await play(Form, engine := speaking("42"))
    assert [message["content"] for message in trajectory.messages[:-1]] == seen
    text = CHAT.decode(engine.calls[0].token_ids)
    assert all(piece in text for piece in seen)


async def test_an_agent_that_never_ends_stops_at_the_turn_limit() -> None:
    """trl#4751: a model that always calls a tool went on for ever."""
    engine = speaking("7")
    trajectory = await play(Guess, engine, max_turns=3)
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert trajectory.truncated
    assert len(engine.calls) == trajectory.num_turns == 3


async def test_feedback_beyond_the_budget_ends_the_episode_without_a_call() -> None:
    """OpenRLHF: feedback ignored the budget; verl-tool#85, trl#3433: then the engine refused."""

    class Talkative(Guess):
        feedback = "higher " * 150

    engine = speaking("7", max_model_len=100)
    trajectory = await play(Talkative, engine, max_tokens=100)
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert trajectory.reward == 0.0
    assert len(engine.calls) == 1
    (sequence,) = trajectory.sequences
    assert len(sequence) <= 100
    assert sequence.num_sampled == 2


@pytest.mark.parametrize("max_tokens", range(30, 120, 7))
async def test_no_context_ever_exceeds_the_budget(max_tokens: int) -> None:
    engine = speaking("7 is my guess", max_model_len=max_tokens)
    trajectory = await play(Guess, engine, max_tokens=max_tokens, max_turns=100)
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert all(len(sequence) <= max_tokens for sequence in trajectory.sequences)
    for call in engine.calls:
        assert len(call.token_ids) + call.params.max_new_tokens <= max_tokens


async def test_a_first_prompt_without_room_names_the_setting() -> None:
    with pytest.raises(UsageError, match=r"rollout\.max_tokens"):
        await play(Guess, speaking("42"), max_tokens=5)


async def test_a_turn_that_was_cut_is_scored_and_is_the_last() -> None:
    """OpenRLHF PR#1327, NeMo-RL#3851: finish reason length was lost in multi-turn."""
    seen = []

    class Watch(Guess):
        async def step(self, action):
            seen.append(action)
            return StepResult(observation="go on", reward=0.5)

    trajectory = await play(Watch, speaking("one two three"), max_new_tokens=3)
    assert [(action.finish_reason, len(action.token_ids)) for action in seen] == [("length", 3)]
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert trajectory.truncated
    assert trajectory.reward == 0.5


async def test_a_cut_turn_that_the_environment_accepts_is_done_and_truncated() -> None:
    class Lenient(Guess):
        async def step(self, action):
            return StepResult(reward=1.0, done=True)

    trajectory = await play(Lenient, speaking("one two three"), max_new_tokens=3)
    assert trajectory.stop_reason is StopReason.DONE
    assert trajectory.truncated


@pytest.mark.parametrize(
    ("rewards", "total"), [((None, None), None), ((None, -1.0), -1.0), ((0.25, 0.5), 0.75)]
)
async def test_rewards_add_up_and_none_at_all_is_not_scorable(rewards, total) -> None:
    class Scripted(AgentInstance):
        async def reset(self, example):
            return "go"

        async def step(self, action):
            last = action.turn_index == len(rewards) - 1
            return StepResult("go on", reward=rewards[action.turn_index], done=last)

    assert (await play(Scripted, speaking("a"))).reward == total


async def test_sampling_overrides_hold_for_one_turn_of_one_episode() -> None:
    """OpenRLHF: siblings shared one object, so the override of one reached the others."""

    class Greedy(Guess):
        async def step(self, action):
            sampling = {"temperature": 0.0} if action.turn_index == 0 else {}
            return StepResult("go on", sampling=sampling, done=action.turn_index == 2)

    engine = speaking("a")
    llm = make_llm(engine)
    await MultiTurnExecutor(Greedy, RolloutConfig()).execute({}, llm)
    assert [call.params.temperature for call in engine.calls] == [1.0, 0.0, 1.0]
    assert llm.sampling.temperature == 1.0


async def test_an_impossible_override_says_what_there_is() -> None:
    class Typo(Guess):
        async def step(self, action):
            return StepResult("go on", sampling={"temprature": 0.0})

    with pytest.raises(AgentError, match=r"temprature.*temperature"):
        await play(Typo, speaking("a"))


async def test_a_raising_step_keeps_its_own_exception() -> None:
    class Broken(Guess):
        async def step(self, action):
            raise KeyError("missing")

    with pytest.raises(KeyError, match="missing"):
        await play(Broken, speaking("a"))


async def test_an_engine_failure_is_no_reward() -> None:
    """UniRL#214: an outage was recorded as an episode with reward 0."""
    with pytest.raises(EngineError):
        await play(Guess, speaking("7", failures=[1]))


@pytest.mark.parametrize(
    "value",
    [
        StepResult(observation="go on", reward=2.0, metrics={"right": 1.0}),
        StepResult("go on", reward=np.array([2.0]), metrics={"right": 1.0}),
        ("go on", 2.0, False, False, {"right": True, "note": "x"}),
        {"observation": "go on", "reward": np.float32(2.0), "metrics": {"right": 1.0}},
        {"environment_feedback": "go on", "rewards": np.array([2.0]), "extra_logs": {"right": 1}},
    ],
)
async def test_plain_values_are_read(value) -> None:
    class Plain(AgentInstance):
        async def reset(self, example):
            return "go", {}

        async def step(self, action):
            return value if action.turn_index == 0 else StepResult(done=True)

    engine = speaking("a")
    trajectory = await play(Plain, engine)
    assert (trajectory.reward, trajectory.metrics) == (2.0, {"right": 1.0})
    assert "go on" in CHAT.decode(engine.calls[1].token_ids)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "step returned a int"),
        (StepResult(observation=3, reward=0.0), "as the observation"),
        ({"observation": "a", "reword": 1.0}, "'reword', which means nothing"),
        ({"reward": 1.0}, "must return an observation"),
        ({"observation": "a", "reward": float("nan")}, "reward is nan"),
        ({"observation": "a", "reward": [1, 2]}, "is not one number"),
        ({"observation": "a", "reward": "2.0"}, "is not one number"),
        ({"observation": "a", "reward": 10**400}, "is not one number"),
    ],
)
async def test_unusable_values_say_what_came(value, message: str) -> None:
    class Bad(AgentInstance):
        async def reset(self, example):
            return "go"

        async def step(self, action):
            return value

    with pytest.raises(AgentError, match=message):
        await play(Bad, speaking("a"))


@pytest.mark.parametrize("value", ["2.0", np.array([1.0, 2.0]), 10**400, float("nan")])
def test_a_step_result_refuses_what_is_not_one_finite_number(value) -> None:
    with pytest.raises(ValueError, match=r"reward is .*: it must be one finite number, or None"):
        StepResult("a", reward=value)


@pytest.mark.parametrize("value", [None, 3, {"obs": "a"}, [], object()])
async def test_an_unusable_first_observation_is_an_error(value) -> None:
    class Bad(Guess):
        async def reset(self, example):
            return value

    with pytest.raises(AgentError):
        await play(Bad, speaking("a"))


async def test_raw_text_and_messages_mix() -> None:
    class Raw(AgentInstance):
        async def reset(self, example):
            return Observation("Q:", raw=True)

        async def step(self, action):
            return StepResult(Observation("\nA:", raw=True), done=action.turn_index == 1)

    engine = speaking("a")
    await play(Raw, engine)
    assert CHAT.decode(engine.calls[1].token_ids) == "Q:a<|im_end|>\nA:"


class Log(AgentInstance):
    """Counts calls of `close`, and notes the thread of every call."""

    closed = 0
    threads: list

    def __init_subclass__(cls) -> None:
        cls.closed, cls.threads = 0, []

    async def close(self):
        type(self).closed += 1


@pytest.mark.parametrize("where", ["", "reset", "step", "engine"])
async def test_close_runs_exactly_once_whatever_happens(where: str) -> None:
    """OpenEnv#991, prime-rl#2175: environments leaked."""

    class Fragile(Log):
        async def reset(self, example):
            if where == "reset":
                raise OSError("reset")
            return "go"

        async def step(self, action):
            if where == "step":
                raise OSError("step")
            return StepResult(done=True)

    engine = speaking("a", failures=[0] if where == "engine" else [])
    if where:
        with pytest.raises((OSError, EngineError)):
            await play(Fragile, engine)
    else:
        await play(Fragile, engine)
    assert Fragile.closed == 1


@pytest.mark.parametrize("blocking", [True, False])
async def test_close_runs_exactly_once_when_the_episode_is_cancelled(blocking: bool) -> None:
    stepping, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    closed = []

    class Waiting(AgentInstance):
        async def reset(self, example):
            return "go"

        async def step(self, action):
            stepping.set()
            await asyncio.Event().wait()

        async def close(self):
            await asyncio.sleep(0)
            closed.append(threading.current_thread())

    class Blocking(AgentInstance):
        def reset(self, example):
            return "go"

        def step(self, action):
            loop.call_soon_threadsafe(stepping.set)
            go_on.wait()

        def close(self):
            closed.append(threading.current_thread())

    episode = asyncio.create_task(play(Blocking if blocking else Waiting, speaking("a")))
    await stepping.wait()
    episode.cancel()
    await asyncio.sleep(0)
    episode.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await episode
    (thread,) = closed
    assert (thread is threading.main_thread()) is not blocking


async def test_a_raising_close_does_not_undo_the_episode(caplog) -> None:
    class Messy(Guess):
        async def close(self):
            raise OSError("socket already closed")

    with caplog.at_level(logging.WARNING):
        trajectory = await play(Messy, speaking("42"))
    assert trajectory.reward == 1.0
    assert "socket already closed" in caplog.text


async def test_a_hanging_close_is_left_behind(caplog) -> None:
    class Slow(Guess):
        async def close(self):
            await asyncio.Event().wait()

    with caplog.at_level(logging.WARNING):
        trajectory = await play(Slow, speaking("42"), rollout=RolloutConfig(close_timeout=0.02))
    assert trajectory.reward == 1.0
    assert "raise rollout.close_timeout" in caplog.text


async def test_plain_methods_run_in_one_thread_of_the_instance() -> None:
    threads = []

    class Plain(AgentInstance):
        def __init__(self):
            threads.append(threading.current_thread())

        def reset(self, example):
            threads.append(threading.current_thread())
            return "go"

        def step(self, action):
            threads.append(threading.current_thread())
            return StepResult("go on", done=action.turn_index == 1)

        def close(self):
            threads.append(threading.current_thread())

    await play(Plain, speaking("a"))
    assert len(threads) == 5
    (thread,) = set(threads)
    assert thread is not threading.main_thread()
    thread.join(5)
    assert not thread.is_alive()


async def test_async_methods_run_on_the_loop() -> None:
    threads = []

    class Async(Guess):
        async def step(self, action):
            threads.append(threading.current_thread())
            return StepResult(done=True)

    before = threading.active_count()
    await play(Async, speaking("a"))
    assert threads == [threading.main_thread()]
    assert threading.active_count() == before


async def test_blocking_steps_overlap() -> None:
    """oumi#2571: eight environments that block did so one after another."""
    together = threading.Barrier(8, timeout=30)

    class Blocking(AgentInstance):
        def reset(self, example):
            return "go"

        def step(self, action):
            # Passes only when all eight are in their step at the same time.
            together.wait()
            return StepResult(reward=1.0, done=True)

    engine = speaking("a")
    trajectories = await asyncio.gather(*(play(Blocking, engine) for _ in range(8)))
    assert [trajectory.reward for trajectory in trajectories] == [1.0] * 8


@pytest.mark.parametrize("method", ["__init__", "reset", "step"])
async def test_a_hanging_blocking_call_times_out_and_is_closed_when_it_returns(
    method: str,
) -> None:
    go_on, closed = threading.Event(), threading.Event()

    class Hanging(AgentInstance):
        def __init__(self):
            self.hang("__init__")

        def hang(self, where):
            if where == method:
                go_on.wait()

        def reset(self, example):
            self.hang("reset")
            return "go"

        def step(self, action):
            self.hang("step")

        def close(self):
            closed.set()

    rollout = RolloutConfig(reset_timeout=0.05, step_timeout=0.05)
    setting = "step_timeout" if method == "step" else "reset_timeout"
    with pytest.raises(AgentTimeoutError, match=rf"Hanging\.{method} .* rollout\.{setting}"):
        await play(Hanging, speaking("a"), rollout=rollout)
    assert not closed.is_set()
    go_on.set()
    assert closed.wait(30)


async def test_a_hanging_async_step_times_out_and_is_closed() -> None:
    class Hanging(Log):
        async def reset(self, example):
            return "go"

        async def step(self, action):
            await asyncio.Event().wait()

    with pytest.raises(AgentTimeoutError, match=r"Hanging\.step"):
        await play(Hanging, speaking("a"), rollout=RolloutConfig(step_timeout=0.02))
    assert Hanging.closed == 1


async def test_a_timeout_of_the_users_own_is_not_ours() -> None:
    class Impatient(Guess):
        async def step(self, action):
            raise TimeoutError("the service did not answer")

    with pytest.raises(TimeoutError, match="the service") as raised:
        await play(Impatient, speaking("a"))
    assert not isinstance(raised.value, AgentTimeoutError)


async def test_stop_iteration_in_a_thread_is_an_error_not_a_wait_for_ever() -> None:
    class Exhausted(AgentInstance):
        def reset(self, example):
            return next(iter([]))

    with pytest.raises(RuntimeError, match="StopIteration"):
        await play(Exhausted, speaking("a"))


async def test_a_single_turn_agent_scores_the_completion() -> None:
    class Right(SingleTurnAgent):
        prompt_key = "question"

        def reward(self, example, completion):
            return float(completion == example["answer"])

    trajectory = await play(Right, speaking("42"), {"question": "6 * 7?", "answer": "42"})
    assert (trajectory.reward, trajectory.num_turns) == (1.0, 1)
    with pytest.raises(AgentError, match="prompt_key"):
        await play(Right, speaking("42"), {"prompt": "6 * 7?"})
