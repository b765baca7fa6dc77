"""What an executor drives an episode with: seeds, budget, aborts, and chat over exact tokens."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from chat_formats import ADD_TOOL, generation
from episodes import CHAT, QWEN, make_llm, speaking

from agentrl import AgentError, EngineError, Generation, Observation, StopReason, UsageError
from agentrl.engines.scripted import ScriptedEngine
from agentrl.errors import ContextOverflowError
from agentrl.types import SamplingParams

USER = {"role": "user", "content": "Guess."}


class Parts(ScriptedEngine):
    """Gives prepared generations one after another."""

    def __init__(self, *parts: Generation) -> None:
        super().__init__([[1]])
        self.parts = list(parts)

    async def generate(self, token_ids, params: SamplingParams, **ids) -> Generation:
        await super().generate(token_ids, params, **ids)
        return self.parts.pop(0)


async def test_seeds_are_stable_and_differ_between_calls_episodes_and_runs() -> None:
    async def seeds(**options) -> list[int]:
        engine = speaking("a")
        llm = make_llm(engine, **options)
        for _ in range(3):
            await llm.generate([1])
        return [call.params.seed for call in engine.calls]

    first = await seeds(seed=1)
    assert first == await seeds(seed=1)
    others = [*await seeds(seed=2), *await seeds(seed=1, rollout_id="r1")]
    assert len({*first, *others}) == 9


async def test_with_ignore_eos_nothing_ends_a_turn_but_its_length() -> None:
    (end, *_) = CHAT.end_token_ids
    engine = ScriptedEngine([[1, end, 2, 5, 3]])
    llm = make_llm(engine)
    whole = await llm.generate([1], ignore_eos=True, max_new_tokens=4, min_new_tokens=4)
    assert whole.token_ids.tolist() == [1, end, 2, 5]
    assert whole.finish_reason == "length"
    (call,) = engine.calls
    assert call.params.stop_token_ids == ()
    assert call.params.min_new_tokens == 0  # engines would keep ids away for it
    with pytest.raises(AgentError, match="leave out one of them"):
        await llm.generate([1], ignore_eos=True, stop_token_ids=(5,))


@pytest.mark.parametrize(
    "override", [{"stop_token_ids": None}, {"stop_token_ids": 5}, {"max_new_tokens": None}]
)
async def test_an_override_of_a_wrong_type_is_the_agents_error(override) -> None:
    with pytest.raises(AgentError, match="sampling parameters are impossible"):
        await make_llm(speaking("a")).generate([1], **override)


class NeverRepeats(ScriptedEngine):
    repeats = False


async def test_an_engine_that_repeats_nothing_is_given_a_seed_only_where_the_agent_sets_one() -> (
    None
):
    engine = NeverRepeats([[1], [1]])
    llm = make_llm(engine)
    await llm.generate([1])
    await llm.generate([1], seed=7)
    assert [call.params.seed for call in engine.calls] == [None, 7]


async def test_the_engine_stops_on_every_end_of_turn_token_and_stays_in_the_budget() -> None:
    engine = speaking("one two three four")
    llm = make_llm(engine, max_tokens=10, max_new_tokens=8)
    await llm.generate([1] * 7, stop_token_ids=(5,), min_new_tokens=6)
    (call,) = engine.calls
    assert set(call.params.stop_token_ids) == {5, *CHAT.end_token_ids}
    assert (call.params.max_new_tokens, call.params.min_new_tokens) == (3, 3)
    assert llm.sampling.max_new_tokens == 8
    with pytest.raises(ContextOverflowError, match=r"llm\.room"):
        await llm.generate([1] * 10)
    assert len(engine.calls) == 1


async def test_an_aborted_turn_goes_on_from_its_tokens() -> None:
    """slime#1440: aborted after 2 tokens, resumed for 3; every array has length 5."""
    engine = Parts(generation([11, 12], "abort", version=1), generation([13, 14, 15], version=2))
    llm = make_llm(engine)
    conversation = llm.conversation(Observation("Guess."))
    prompt = len(conversation)
    conversation.take(await llm.generate(conversation.token_ids))
    (sequence,) = conversation.sequences()
    mask = sequence.response_mask
    assert sequence.token_ids[mask].tolist() == [11, 12, 13, 14, 15]
    assert sequence.weight_versions[mask].tolist() == [1, 1, 2, 2, 2]
    assert sequence.logprobs[mask].tolist() == [-0.5] * 5
    assert len(sequence.turns) == 1
    assert engine.calls[1].token_ids[prompt:] == (11, 12)
    assert engine.calls[1].params.max_new_tokens == engine.calls[0].params.max_new_tokens - 2
    assert engine.calls[1].params.seed != engine.calls[0].params.seed


async def test_an_aborted_turn_at_its_limit_was_cut() -> None:
    llm = make_llm(Parts(generation([11, 12], "abort")), max_new_tokens=2)
    assert (await llm.generate([1])).finish_reason == "length"


async def test_an_engine_that_only_aborts_is_an_error() -> None:
    with pytest.raises(EngineError, match="without a token"):
        await make_llm(Parts(*[generation([], "abort")] * 200)).generate([1])


async def test_parts_with_and_without_logprobs_do_not_make_a_turn() -> None:
    bare = Generation(np.array([3]), None, np.array([0]), "stop")
    with pytest.raises(EngineError, match="1 of 2 parts"):
        await make_llm(Parts(generation([1], "abort"), bare)).generate([1])


async def test_impossible_overrides_are_the_agents_error() -> None:
    with pytest.raises(AgentError, match="temperature is -1"):
        await make_llm(speaking("a")).generate([1], temperature=-1)


async def test_chat_continues_the_sampled_tokens() -> None:
    engine = speaking("40", "50")
    llm = make_llm(engine)
    reply = await llm.chat([USER])
    assert reply.message == {"role": "assistant", "content": "40"}
    await llm.chat([USER, reply.message, {"role": "user", "content": "higher"}])
    trajectory = llm.trajectory(reward=1.0)
    (sequence,) = trajectory.sequences
    assert [turn.end - turn.start for turn in sequence.turns] == [
        len(CHAT.encode("40")) + 1,
        len(CHAT.encode("50")) + 1,
    ]
    first, second = engine.calls
    said = (*CHAT.encode("40"), CHAT.traits.end_token_id)
    assert second.token_ids[: len(first.token_ids) + len(said)] == first.token_ids + said


async def test_chat_with_a_rewritten_history_begins_a_new_sequence() -> None:
    llm = make_llm(speaking("40", "50"))
    await llm.chat([USER])
    await llm.chat([{"role": "user", "content": "In short: they said 40. Guess again."}])
    assert len(llm.trajectory(reward=1.0).sequences) == 2


async def test_chat_with_tools_round_trips_through_an_openai_client() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    engine = speaking(f"<think>\nadd\n</think>\n\nLet me add.\n{call}", "3", chat=QWEN)
    llm = make_llm(engine, chat=QWEN)
    message = (await llm.chat([USER], [ADD_TOOL])).message
    assert message["content"] == "Let me add."
    assert message["reasoning_content"] == "add"
    (tool_call,) = message["tool_calls"]
    assert tool_call["function"] == {"name": "add", "arguments": {"a": 1, "b": 2}}
    # What a client sends back: no reasoning, and the arguments as text.
    function = {"name": "add", "arguments": '{"b": 2, "a": 1}'}
    returned = {
        "role": "assistant",
        "content": "Let me add.",
        "tool_calls": [{"id": tool_call["id"], "type": "function", "function": function}],
    }
    result = {"role": "tool", "tool_call_id": tool_call["id"], "content": "3"}
    await llm.chat([USER, returned, result], [ADD_TOOL])
    assert len(llm.trajectory(reward=1.0).sequences) == 1
    assert "<think>" in QWEN.decode(engine.calls[1].token_ids)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"max_turns": 1}, StopReason.MAX_TURNS), ({"max_tokens": 60}, StopReason.MAX_TOKENS)],
)
async def test_chat_beyond_the_budget_replies_without_a_call(limits, reason) -> None:
    engine = speaking("40")
    llm = make_llm(engine, **limits)
    reply = await llm.chat([USER])
    history = [USER, reply.message, {"role": "user", "content": "higher " * 30}]
    refused = await llm.chat(history)
    assert (refused.message["content"], refused.action.finish_reason) == ("", "length")
    assert len(engine.calls) == 1
    assert llm.trajectory(reward=0.0).stop_reason is reason


async def test_an_agent_that_chats_for_ever_can_be_timed_out() -> None:
    llm = make_llm(speaking("40"), max_turns=1)

    async def never_ending() -> None:
        while True:
            await llm.chat([USER])

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(never_ending(), 0.05)


async def test_a_first_chat_without_room_names_the_setting() -> None:
    with pytest.raises(UsageError, match=r"rollout\.max_tokens"):
        await make_llm(speaking("40"), max_tokens=5).chat([USER])


async def test_engine_seconds_are_counted() -> None:
    llm = make_llm(speaking("40", latency=0.01))
    await llm.generate([1])
    assert llm.trajectory(reward=None).timings.engine > 0


async def test_a_turn_remembers_the_temperature_that_it_was_sampled_at() -> None:
    """The learner has to divide the logits by it again, whatever the run's own temperature is."""
    llm = make_llm(speaking("one", "two"))
    conversation = llm.conversation(Observation("Guess."))
    conversation.take(await llm.generate(conversation.token_ids, temperature=0.5))
    conversation.append(Observation("Again."))
    conversation.take(await llm.generate(conversation.token_ids))
    (sequence,) = conversation.sequences()
    assert [turn.temperature for turn in sequence.turns] == [0.5, llm.sampling.temperature]


async def test_a_conversation_begins_with_all_that_reset_may_return() -> None:
    llm = make_llm(speaking("a"))
    expected = llm.conversation(Observation("Guess.")).token_ids
    for value in ("Guess.", [USER], USER, {"observation": "Guess."}, ("Guess.", {})):
        assert llm.conversation(value).token_ids == expected, value
    with pytest.raises(AgentError, match=r"llm\.conversation was given 7 .* must be a str"):
        llm.conversation(7)
