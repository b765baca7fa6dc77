"""Outside the sampled spans a conversation's ids are the template's; inside, the sampler's."""

from __future__ import annotations

import numpy as np
import pytest
from chat_formats import ADD_TOOL, generation, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl import EngineError, Observation
from agentrl.chat import ChatFormat, Conversation
from agentrl.types import Generation

APPENDING = ("chatml", "smollm", "llama3", "qwen3", "strict")


def hold(
    family: str, *turns: tuple[str, str | list[dict]], tools: tuple[dict, ...] = (), **options: str
) -> tuple[Conversation, object]:
    """Begin with "Guess." and alternate (what the policy says, what the environment says)."""
    tokenizer = make_tokenizer(family)
    chat = ChatFormat(tokenizer, **options)
    conversation = chat.conversation(Observation("Guess.", tools=tools))
    for said, heard in turns:
        say(conversation, chat, said)
        conversation.append(Observation(heard))
    return conversation, tokenizer


def say(conversation: Conversation, chat: ChatFormat, text: str) -> None:
    end = [chat.traits.end_token_id] if chat.traits.end_token_id is not None else []
    conversation.take(generation(chat.encode(text) + end))


def rendering(conversation: Conversation, tokenizer: object) -> list[int]:
    return tokenizer.apply_chat_template(
        conversation.messages,
        tools=list(conversation.tools) or None,
        add_generation_prompt=True,
        return_dict=False,
    )


def tool_result(content: str, call_id: str = "call_0_0") -> dict:
    return {"role": "tool", "name": "add", "tool_call_id": call_id, "content": content}


@pytest.mark.parametrize("family", APPENDING)
def test_ids_are_the_template_rendering(family: str) -> None:
    conversation, tokenizer = hold(family, ("40", "The number is higher.\n"), ("50", " lower "))
    assert conversation.token_ids == rendering(conversation, tokenizer)
    assert conversation.messages[1] == {"role": "assistant", "content": "40"}


@pytest.mark.parametrize("family", ["chatml", "smollm", "llama3", "qwen3"])
def test_separators_after_the_end_of_turn_survive_a_tool_turn(family: str) -> None:
    """verl#6501, trl#5317: the line break between the assistant's turn and the tool's was lost."""
    result = 'a "quoted"\n<result> \\ é'
    conversation, tokenizer = hold(
        family, ("I call the tool.", [tool_result(result)]), tools=(ADD_TOOL,)
    )
    assert conversation.token_ids == rendering(conversation, tokenizer)


def test_a_template_that_wants_structured_calls_still_renders_results() -> None:
    conversation, tokenizer = hold("strict", ("calling", [tool_result("3")]))
    tail = "calling<|im_end|><|im_start|>result\n3<|im_end|><|im_start|>assistant\n"
    assert tokenizer.decode(conversation.token_ids).endswith(tail)


_content = st.lists(
    st.sampled_from([*"ab1 \n\t\"'<>{}\\é", "<|im_end|>", "\n\n", "<tool_response>"]), max_size=12
).map("".join)
_answer = st.text(alphabet="abc12 ", min_size=1, max_size=8).map(lambda text: f"a{text}b")


@settings(max_examples=40, deadline=None)
@given(
    family=st.sampled_from(["chatml", "smollm", "llama3", "qwen3"]),
    turns=st.lists(st.tuples(_answer, _content), min_size=1, max_size=4),
)
def test_any_feedback_renders_as_the_template_renders_it(
    family: str, turns: list[tuple[str, str]]
) -> None:
    conversation, tokenizer = hold(family, *turns)
    assert conversation.token_ids == rendering(conversation, tokenizer)


def test_messages_appended_one_by_one_render_as_one_observation() -> None:
    once, tokenizer = hold("qwen3", ("a", [tool_result("1"), tool_result("2", "call_0_1")]))
    chat = ChatFormat(tokenizer)
    twice = chat.conversation(Observation("Guess."))
    say(twice, chat, "a")
    twice.append(Observation([tool_result("1")]))
    twice.append(Observation([tool_result("2", "call_0_1")]))
    assert twice.token_ids == once.token_ids == rendering(twice, tokenizer)
    assert twice.messages == once.messages


def test_results_of_parallel_calls_stand_in_call_order() -> None:
    """slime#2263: of two consecutive tool results one was lost; here they even come reversed."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": %d, "b": 2}}\n</tool_call>'
    tokenizer = make_tokenizer("qwen3")
    chat = ChatFormat(tokenizer)
    conversation = chat.conversation(Observation("Add.", tools=(ADD_TOOL,)))
    action = conversation.take(generation(chat.encode(call % 1 + "\n" + call % 5)))
    a, b = action.tool_calls
    assert (a.arguments["a"], b.arguments["a"]) == (1, 5)
    conversation.append(Observation([tool_result("seven", b.id), tool_result("three", a.id)]))
    text = tokenizer.decode(conversation.token_ids)
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\nthree\n</tool_response>\n<tool_response>\nseven\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert conversation.token_ids == rendering(conversation, tokenizer)


def test_sampled_ids_are_never_encoded_again() -> None:
    """verl#6719, rllm#272: ids [A, B] whose text encodes to one token were trained as that one."""
    tokenizer = make_tokenizer("chatml")
    chat = ChatFormat(tokenizer)
    a, b, end = chat.encode("t"), chat.encode("h"), chat.traits.end_token_id
    assert len(chat.encode("th")) == 1
    conversation = chat.conversation(Observation("Guess."))
    action = conversation.take(generation([*a, *b, end]))
    conversation.append(Observation("higher"))
    conversation.take(generation([end]))
    (sequence,) = conversation.sequences()
    assert action.text == "th"
    assert sequence.token_ids[sequence.response_mask].tolist() == [*a, *b, end, end]


def test_the_mask_counts_what_was_sampled() -> None:
    """SkyRL PR#710: generation prompts and separators were counted as sampled."""
    conversation, tokenizer = hold("llama3", ("40", "higher"), ("50", "lower"))
    chat = ChatFormat(tokenizer)
    say(conversation, chat, "45")
    (sequence,) = conversation.sequences()
    sampled = sum(len(chat.encode(text)) + 1 for text in ("40", "50", "45"))
    assert sequence.num_sampled == sampled
    assert [turn.end - turn.start for turn in sequence.turns] == [
        len(chat.encode(text)) + 1 for text in ("40", "50", "45")
    ]
    # Nothing after the last sampled token is kept: the policy never saw it.
    assert sequence.response_mask[-1]


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
def test_an_end_of_turn_token_that_was_not_sampled_is_not_trained(finish_reason: str) -> None:
    """SkyRL PR#758: it was appended because a stop string matched, and got mask 1."""
    tokenizer = make_tokenizer("chatml")
    chat = ChatFormat(tokenizer)
    conversation = chat.conversation(Observation("Guess."))
    conversation.take(generation(chat.encode("40"), finish_reason))
    conversation.append(Observation("higher"))
    say(conversation, chat, "50")
    (sequence,) = conversation.sequences()
    first = sequence.turns[0]
    assert sequence.token_ids[first.end] == chat.traits.end_token_id
    assert not sequence.response_mask[first.end]
    whole = tokenizer.apply_chat_template(conversation.messages, return_dict=False)
    assert sequence.token_ids.tolist() == whole[: len(sequence)]


def test_the_final_end_of_turn_token_is_trained_though_it_pads_too() -> None:
    """trl#4974: masking by the padding token's id masked the last end-of-turn token."""
    tokenizer = make_tokenizer("chatml")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    chat = ChatFormat(tokenizer)
    conversation = chat.conversation(Observation("Guess."))
    say(conversation, chat, "40")
    (sequence,) = conversation.sequences()
    assert sequence.token_ids[-1] == tokenizer.pad_token_id
    assert sequence.response_mask[-1]


def test_assistant_messages_of_the_prompt_are_not_trained() -> None:
    """NeMo-RL#2176: they were."""
    chat = ChatFormat(make_tokenizer("chatml"))
    conversation = chat.conversation(
        Observation(
            [
                {"role": "user", "content": "1 + 1?"},
                {"role": "assistant", "content": "2"},
                {"role": "user", "content": "2 + 2?"},
            ]
        )
    )
    prompt = len(conversation)
    say(conversation, chat, "4")
    (sequence,) = conversation.sequences()
    assert not sequence.response_mask[:prompt].any()
    assert sequence.response_mask[prompt:].all()


@pytest.mark.parametrize("history", ["keep", "template"])
def test_a_last_character_that_merges_with_the_separator_stays_as_it_was(history: str) -> None:
    """trl#5559: ids were cut where the text's prefix ended, inside a merged token."""
    tokenizer = make_tokenizer("lines")
    chat = ChatFormat(tokenizer, history=history)
    conversation = chat.conversation(Observation("Guess."))
    prompt = conversation.token_ids
    said = chat.encode("40\n")
    assert chat.encode("40\n\n\n")[: len(said)] != said
    conversation.take(generation([*said, tokenizer.eos_token_id]))
    conversation.append(Observation("higher"))
    separator = chat.encode("\n\nuser: higher\n\nassistant: ")
    assert conversation.token_ids == [*prompt, *said, tokenizer.eos_token_id, *separator]


def test_a_turn_ends_on_every_end_of_turn_token() -> None:
    """verl#5649: the model's end-of-turn token is not the tokenizer's eos."""
    tokenizer = make_tokenizer("chatml", eos_token="<|endoftext|>")
    extra = tokenizer.convert_tokens_to_ids("<|im_start|>")
    chat = ChatFormat(tokenizer, generation_eos=(extra,))
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert chat.end_token_ids == {end_of_turn, tokenizer.eos_token_id, extra}
    for end in (end_of_turn, tokenizer.eos_token_id):
        conversation = chat.conversation(Observation("Guess."))
        assert conversation.take(generation([*chat.encode("40"), end])).text == "40"
        conversation.append(Observation("higher"))
        # One end-of-turn token, the sampled one.
        text = tokenizer.decode(conversation.token_ids)
        assert text.endswith(
            f"40{tokenizer.decode([end])}\n<|im_start|>user\nhigher<|im_end|>\n"
            "<|im_start|>assistant\n"
        )


def test_missing_logprobs_are_an_error() -> None:
    """vime#70: they were padded with 0."""
    chat = ChatFormat(make_tokenizer("chatml"))
    conversation = chat.conversation(Observation("Guess."))
    say(conversation, chat, "40")
    conversation.append(Observation("higher"))
    conversation.take(Generation(np.array([1, 2]), None, np.array([0, 0]), "stop"))
    with pytest.raises(EngineError, match="1 of 2 turns"):
        conversation.sequences()


def test_turns_carry_rewards_reasons_and_cached_tokens() -> None:
    chat = ChatFormat(make_tokenizer("chatml"))
    conversation = chat.conversation(Observation("Guess."))
    conversation.take(generation([5, 6], "length", version=3))
    conversation.set_reward(0.25)
    (sequence,) = conversation.sequences()
    (turn,) = sequence.turns
    assert (turn.reward, turn.finish_reason, turn.end - turn.start) == (0.25, "length", 2)
    assert sequence.weight_versions[sequence.response_mask].tolist() == [3, 3]


def test_the_length_with_an_observation_is_known_before_it_is_appended() -> None:
    chat = ChatFormat(make_tokenizer("qwen3"))
    conversation = chat.conversation(Observation("Guess."))
    conversation.take(generation(chat.encode("40"), "length"))
    observation, before = Observation("The number is higher."), len(conversation)
    expected = conversation.length_with(observation)
    assert len(conversation) == before
    conversation.append(observation)
    assert len(conversation) == expected > before


def test_raw_text_goes_in_as_it_is() -> None:
    chat = ChatFormat(make_tokenizer("chatml"))
    conversation = chat.conversation(Observation("Q: 1 + 1?\nA:", raw=True))
    conversation.take(generation(chat.encode(" 2")))
    conversation.append(Observation("\nQ: 2 + 2?\nA:", raw=True))
    assert conversation.token_ids == [
        token_id
        for text in ("Q: 1 + 1?\nA:", " 2", "\nQ: 2 + 2?\nA:")
        for token_id in chat.encode(text)
    ]
