"""Templates that would lose a message or a token: noticed, avoided, or refused with a remedy."""

from __future__ import annotations

import pytest
from chat_formats import ADD_TOOL, CHATML, generation, make_tokenizer

from agentrl import AgentError, Observation, UsageError
from agentrl.chat import ChatFormat

RESULTS = [
    {"role": "tool", "name": "add", "tool_call_id": f"call_0_{index}", "content": content}
    for index, content in enumerate(("three", "seven"))
]

# Results of tools are part of the turn that called, and dropped where none did (as Gemma 4 does).
INSIDE_THE_TURN = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '[CALL]' + (call.function.arguments | tojson) }}
{%- for result in messages[loop.index0:] if result.role == 'tool' %}
{{- '[RESULT]' + result.content }}
{%- endfor %}
{%- endfor %}{{- '<|im_end|>' }}
{%- elif message.role != 'tool' %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# No token ends a turn but the mark of the next role (as in GLM).
ROLE_MARKS = """\
{%- for message in messages %}
{{- ('<|im_start|>' if message.role == 'user' else '<|im_end|>') + message.content }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_end|>' }}{%- endif %}"""

# A turn ends with another token once something follows (as in gpt-oss).
TWO_ENDS = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{{- '<|endoftext|>' if loop.last and message.role == 'assistant' else '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

ONLY_USERS = CHATML.replace(
    "{%- for message in messages %}",
    "{%- for message in messages if message.role in ('user', 'assistant') %}",
)


def make(template: str) -> ChatFormat:
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = template
    return ChatFormat(tokenizer, tool_parser="hermes")


def after_a_turn(chat: ChatFormat, observation: Observation, end: int) -> str:
    conversation = chat.conversation(Observation("Add."))
    conversation.take(generation([*chat.encode("Yes."), end]))
    conversation.append(observation)
    return chat.decode(conversation.token_ids)


@pytest.mark.parametrize("template", [INSIDE_THE_TURN, ONLY_USERS])
def test_results_that_the_template_would_drop_are_given_as_a_user_message(template: str) -> None:
    """slime#2263: results of tools were lost without a word."""
    chat = make(template)
    assert not chat.traits.tool_role
    text = after_a_turn(chat, Observation(RESULTS), chat.traits.end_token_id)
    assert "<|im_start|>user\n<tool_response>\nthree\n</tool_response>" in text
    assert text.index("three") < text.index("seven")


def test_a_message_that_the_template_would_drop_is_an_error() -> None:
    """TRL#6067: an observation was thrown away; here the template would do it."""
    chat = make(ONLY_USERS)
    for messages in (
        [{"role": "system", "content": "Be brief."}],
        [{"role": "user", "content": "higher"}, {"role": "system", "content": "Be brief."}],
    ):
        with pytest.raises(AgentError, match="leaves out one of the messages"):
            after_a_turn(chat, Observation(messages), chat.traits.end_token_id)
    with pytest.raises(AgentError, match="leaves out system messages"):
        chat.conversation(
            Observation(
                [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Guess."}]
            )
        )


def test_a_mark_of_the_next_role_that_was_sampled_is_not_written_again() -> None:
    """verl#5649: the model stops on a token that is not its eos."""
    chat = make(ROLE_MARKS)
    tokenizer = chat.tokenizer
    user = tokenizer.convert_tokens_to_ids("<|im_start|>")
    chat = ChatFormat(tokenizer, generation_eos=(user,))
    assert chat.traits.end_token_id is None
    assert after_a_turn(chat, Observation("higher"), user) == (
        "<|im_start|>Add.<|im_end|>Yes.<|im_start|>higher<|im_end|>"
    )
    # Cut before it, it is the template's.
    conversation = chat.conversation(Observation("Add."))
    conversation.take(generation(chat.encode("Yes."), "length"))
    conversation.append(Observation("higher"))
    assert chat.decode(conversation.token_ids) == (
        "<|im_start|>Add.<|im_end|>Yes.<|im_start|>higher<|im_end|>"
    )
    (sequence,) = conversation.sequences()
    assert sequence.num_sampled == len(chat.encode("Yes."))


def test_a_template_that_changes_the_end_of_a_turn_afterwards_is_refused_at_the_start() -> None:
    with pytest.raises(UsageError, match=r"<\|endoftext\|> only while nothing follows"):
        make(TWO_ENDS)


def test_text_that_is_no_text_is_the_agents_error() -> None:
    chat = make(CHATML)
    with pytest.raises(AgentError, match="lone surrogates"):
        after_a_turn(chat, Observation("half a pair: \ud83c"), chat.traits.end_token_id)


def test_templates_without_generation_marks_still_give_a_mask() -> None:
    """transformers' assistant mask is all zeros for them; agentrl never asks for it."""
    tokenizer = make_tokenizer("qwen3")
    assert "generation" not in tokenizer.chat_template.replace("add_generation_prompt", "")
    chat = ChatFormat(tokenizer)
    conversation = chat.conversation(Observation("Add.", tools=(ADD_TOOL,)))
    said = [*chat.encode("Yes."), chat.traits.end_token_id]
    conversation.take(generation(said))
    rendered = tokenizer.apply_chat_template(
        conversation.messages, return_dict=True, return_assistant_tokens_mask=True
    )
    assert not any(rendered["assistant_masks"])
    (sequence,) = conversation.sequences()
    assert sequence.token_ids[sequence.response_mask].tolist() == said
