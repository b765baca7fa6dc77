"""A template that rewrites history is noticed, and what then happens is an explicit choice."""

from __future__ import annotations

import logging

import pytest
from chat_formats import generation, make_tokenizer

from agentrl import Observation
from agentrl.chat import ChatFormat, Conversation

THOUGHT = "<think>\nhigher\n</think>\n\n"


def converse(family: str, history: str, said: tuple[str, ...]) -> tuple[Conversation, ChatFormat]:
    chat = ChatFormat(make_tokenizer(family), history=history)
    conversation = chat.conversation(Observation("Guess."))
    for index, text in enumerate(said):
        if index:
            conversation.append(Observation("The number is higher."))
        conversation.take(generation([*chat.encode(text), chat.traits.end_token_id]))
    return conversation, chat


@pytest.mark.parametrize("family", ["chatml", "smollm", "llama3", "strict", "lines"])
def test_an_appending_template_rewrites_nothing(family: str) -> None:
    assert ChatFormat(make_tokenizer(family)).rewrites == ()


def test_a_template_that_drops_thinking_is_noticed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        chat = ChatFormat(make_tokenizer("qwen3"))
    assert chat.rewrites == ("thinking",)
    assert "set rollout.history to template" in caplog.text


def test_keep_appends_to_the_thinking() -> None:
    """verl#6854, gem#44: earlier thinking is dropped by the template; rllm#352: a zero mask."""
    conversation, chat = converse("qwen3", "keep", (f"{THOUGHT}40", f"{THOUGHT}50"))
    (sequence,) = conversation.sequences()
    sampled = [*chat.encode(f"{THOUGHT}40"), chat.traits.end_token_id]
    first, second = sequence.turns
    assert sequence.token_ids[first.start : first.end].tolist() == sampled
    assert sequence.response_mask[first.start : first.end].all()
    assert second.start > first.end


def test_template_forks_where_the_thinking_is_dropped() -> None:
    """verl#6854, gem#44: the other choice; both sequences train what was sampled in them."""
    conversation, chat = converse("qwen3", "template", (f"{THOUGHT}40", f"{THOUGHT}50"))
    old, new = conversation.sequences()
    assert old.num_sampled == len(chat.encode(f"{THOUGHT}40")) + 1
    assert new.num_sampled == len(chat.encode(f"{THOUGHT}50")) + 1
    prompt = new.token_ids[: new.turns[0].start].tolist()
    assert prompt == chat.prompt_ids(conversation.messages[:-1])
    assert "<think>" not in chat.decode(prompt)


def test_template_stays_one_sequence_while_nothing_is_rewritten() -> None:
    conversation, chat = converse("qwen3", "template", ("40", "50", "60"))
    (sequence,) = conversation.sequences()
    assert len(sequence.turns) == 3
    whole = chat.prompt_ids(conversation.messages)
    assert sequence.token_ids.tolist() == whole[: len(sequence)]


def test_template_with_ids_that_no_encoding_gives_does_not_fork() -> None:
    chat = ChatFormat(make_tokenizer("qwen3"), history="template")
    conversation = chat.conversation(Observation("Guess."))
    conversation.take(generation([*chat.encode("t"), *chat.encode("h")]))
    conversation.append(Observation("higher"))
    conversation.take(generation(chat.encode("40")))
    assert len(conversation.sequences()) == 1


def test_messages_appended_to_a_fork_belong_to_it() -> None:
    conversation, chat = converse("qwen3", "template", (f"{THOUGHT}40",))
    conversation.append(Observation("The number is higher."))
    conversation.append(Observation("Guess again."))
    assert conversation.token_ids == chat.prompt_ids(conversation.messages)
    conversation.take(generation(chat.encode("50")))
    assert len(conversation.sequences()) == 2


def test_thinking_that_the_prompt_opens_belongs_to_the_message_not_to_the_action() -> None:
    chat = ChatFormat(make_tokenizer("open_thinking"))
    assert chat.thinking_prefix == "<think>\n"
    conversation = chat.conversation(Observation("Guess."))
    action = conversation.take(generation(chat.encode("higher</think>40")))
    assert action.text == "higher</think>40"
    assert conversation.messages[-1]["content"] == "<think>\nhigher</think>40"


def test_a_dialogue_under_open_thinking_forks_when_the_template_is_followed() -> None:
    conversation, _ = converse("open_thinking", "template", ("a</think>40", "b</think>50"))
    assert len(conversation.sequences()) == 2
