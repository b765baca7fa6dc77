"""Budget and failure, with the values that other systems got wrong."""

from __future__ import annotations

import pytest
from chat_formats import generation
from episodes import CHAT, make_llm, play, speaking

from agentrl import AgentExecutor, AgentInstance, Observation, StepResult, StopReason
from agentrl.config import RolloutConfig
from agentrl.engines.scripted import ScriptedEngine
from agentrl.executors.groups import GroupRequest
from agentrl.executors.multi_turn import MultiTurnExecutor
from agentrl.executors.scheduler import RolloutScheduler
from agentrl.types import Generation, SamplingParams

USER = {"role": "user", "content": "Guess."}


def feedback_for(length: int) -> str:
    """Feedback with which the context after "Guess." and "7" holds exactly `length` tokens."""
    conversation = CHAT.conversation(Observation("Guess."))
    conversation.take(speaking_once("7"))
    bare = conversation.length_with(Observation(""))
    return "1 " * ((length - bare) // 2) + "1" * ((length - bare) % 2)


def speaking_once(text: str) -> Generation:
    return generation([*CHAT.encode(text), CHAT.traits.end_token_id])


@pytest.mark.parametrize(("length", "calls"), [(176, 1), (100, 1), (99, 2)])
async def test_feedback_of_176_tokens_never_exceeds_a_budget_of_100(length, calls) -> None:
    """OpenRLHF: feedback ignored the budget. The last token of the budget must be sampled."""
    said = feedback_for(length)

    class Talks(AgentInstance):
        async def reset(self, example):
            return "Guess."

        async def step(self, action):
            return StepResult(said, reward=0.5)

    conversation = CHAT.conversation(Observation("Guess."))
    conversation.take(speaking_once("7"))
    assert conversation.length_with(Observation(said)) == length

    engine = speaking("7", max_model_len=100)
    trajectory = await play(Talks, engine, max_tokens=100)
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert trajectory.truncated
    assert len(engine.calls) == calls
    assert all(len(sequence) <= 100 for sequence in trajectory.sequences)
    assert all(len(c.token_ids) + c.params.max_new_tokens <= 100 for c in engine.calls)


async def test_the_budget_is_also_the_engines_own() -> None:
    """verl-tool#85, trl#3433: the engine holds less than the setting says."""
    engine = speaking("7", max_model_len=100)
    llm = make_llm(engine, max_tokens=4096)
    assert llm.max_tokens == 100
    reply = await llm.chat([USER])
    refused = await llm.chat([USER, reply.message, {"role": "user", "content": "1 " * 150}])
    assert refused.action.finish_reason == "length"
    trajectory = llm.trajectory(reward=0.0)
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert trajectory.truncated
    assert len(engine.calls) == 1


class Waits(AgentInstance):
    async def reset(self, example):
        return "Guess."

    async def step(self, action):
        return StepResult("go on", reward=0.25)


class Blocks(AgentInstance):
    def reset(self, example):
        return "Guess."

    def step(self, action):
        return StepResult("go on", reward=0.25)


@pytest.mark.parametrize("agent", [Waits, Blocks])
async def test_a_second_turn_that_is_cut_is_truncated_for_both_kinds_of_agent(agent) -> None:
    """OpenRLHF PR#1327, NeMo-RL#3851: finish reason length was lost in multi-turn."""
    engine = speaking("7", "one two three")
    trajectory = await play(agent, engine, max_new_tokens=3)
    assert [turn.finish_reason for turn in trajectory.sequences[0].turns] == ["stop", "length"]
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
    assert trajectory.truncated
    assert trajectory.reward == 0.5


async def test_a_last_reply_that_is_cut_is_truncated_in_an_agent_that_chats() -> None:
    class Chats(AgentExecutor):
        async def execute(self, example, llm):
            reply = await llm.chat([USER])
            reply = await llm.chat([USER, reply.message, {"role": "user", "content": "higher"}])
            assert reply.action.finish_reason == "length"
            return llm.trajectory(reward=1.0)

    trajectory = await play(Chats(), speaking("7", "one two three"), max_new_tokens=3)
    assert trajectory.truncated


async def test_one_of_eight_environments_raises_and_the_other_seven_complete() -> None:
    """SkyRL#1613: a fresh instance for the retry, then dropped from the group, and counted."""
    built: list[Fragile] = []

    class Fragile(AgentInstance):
        def __init__(self):
            self.steps, self.closed = 0, 0
            built.append(self)

        async def reset(self, example):
            return "Guess."

        async def step(self, action):
            self.steps += 1
            if built.index(self) in (3, 8):
                raise ConnectionError("the simulator is gone")
            return StepResult(reward=1.0, done=True)

        async def close(self):
            self.closed += 1

    rollout = RolloutConfig(max_retries=1)
    scheduler = RolloutScheduler.local(
        MultiTurnExecutor(Fragile, rollout),
        ScriptedEngine([[7]]),
        CHAT,
        SamplingParams(max_new_tokens=4),
        rollout,
    )
    result = await scheduler.run([GroupRequest("g", "e", {}, 8)])
    (group,) = result.groups
    assert group.rewards == (1.0,) * 7
    assert [(each.steps, each.closed) for each in built] == [(1, 1)] * 9
    (dropped,) = result.dropped
    assert (dropped.rollout_id, dropped.reward) == ("g-003", None)
    assert "ConnectionError: the simulator is gone" in dropped.error
    assert result.metrics()["rollout/dropped_members"] == 1.0
    assert result.metrics()["rollout/failed_env_error"] == 2.0
    assert result.metrics()["rollout/completed"] == 7.0
