"""Tool calls are read as models write them, and unreadable ones become errors, not exceptions."""

from __future__ import annotations

import logging

import pytest
from chat_formats import ADD_TOOL, generation, make_tokenizer

from agentrl import AgentError, Observation, UsageError
from agentrl.chat import ChatFormat, split_thinking
from agentrl.chat.tools import parse_tool_calls

CALL = '{"name": "add", "arguments": {"a": 1, "b": 2}}'


def parse(text: str, parser: str = "hermes") -> list[tuple[str, dict, str | None]]:
    calls = parse_tool_calls(text, parser, id_prefix="call_0_")
    assert [call.id for call in calls] == [f"call_0_{index}" for index in range(len(calls))]
    return [(call.name, dict(call.arguments), call.error) for call in calls]


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", f"Let me see.\n<tool_call>\n{CALL}\n</tool_call>"),
        ("hermes", f"<tool_call>{CALL}"),
        ("llama3", CALL.replace("arguments", "parameters")),
        ("llama3", f"<|python_tag|>{CALL}"),
        ("json", f"```json\n{CALL}\n```"),
        ("json", f"[{CALL}]"),
        ("json", '{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}'),
    ],
)
def test_a_call_is_read(parser: str, text: str) -> None:
    assert parse(text, parser) == [("add", {"a": 1, "b": 2}, None)]


@pytest.mark.parametrize("parser", ["hermes", "llama3", "json", "none"])
def test_plain_text_is_no_call(parser: str) -> None:
    assert parse("The answer is 42.", parser) == []


def test_parallel_calls_are_read_in_order() -> None:
    second = CALL.replace("1", "7")
    assert [call[1]["a"] for call in parse(f"<|python_tag|>{CALL}; {second}", "llama3")] == [1, 7]


def test_a_call_inside_thinking_does_not_count() -> None:
    """verl#4757: one call inside <think> and one outside are exactly one call."""
    tagged = f"<tool_call>{CALL}</tool_call>"
    assert len(parse(f"<think>I could {tagged}</think>{tagged}")) == 1
    assert parse(f"<think>cut while thinking of {tagged}") == []
    assert len(parse(f"thinking that the prompt opened, {tagged}</think>{tagged}")) == 1


def test_thinking_is_told_from_the_rest() -> None:
    assert split_thinking("<think>a</think>b") == ("a", "b")
    assert split_thinking("a</think>b") == ("a", "b")
    assert split_thinking("b") == ("", "b")
    assert split_thinking("<think>a") == ("a", "")


@pytest.mark.parametrize(
    "body", ['{"a": 1', "{}", "[]", "null", "", '{"name": "add", "arguments": 3}']
)
@pytest.mark.parametrize("parser", ["hermes", "json"])
def test_malformed_calls_carry_an_error(body: str, parser: str) -> None:
    """verifiers#1763, trl#4881: they raised, and ended the episode."""
    text = f"<tool_call>{body}</tool_call>" if parser == "hermes" else body
    if parser == "json" and not body:
        assert parse(text, parser) == []
        return
    ((_, arguments, error),) = parse(text, parser)
    assert error
    assert arguments == {}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("[" * 5000, "nests deeper than 64 levels"),
        ('{"a": ' * 5000, "nests deeper than 64 levels"),
        ('{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}", "4300 digits"),
        ('{"name": "add", "arguments": "' + "9" * 5000 + '"}', "4300 digits"),
        ('{"name": "add", "arguments": {"a": "\\ud83c"}}', "surrogates not allowed"),
    ],
)
@pytest.mark.parametrize("parser", ["hermes", "json"])
def test_a_call_that_would_break_the_reader_carries_an_error(
    parser: str, body: str, told: str
) -> None:
    """verifiers#1763, trl#4881: a model that runs wild must not end its episode by it."""
    ((_, arguments, error),) = parse(f"<tool_call>{body}" if parser == "hermes" else body, parser)
    assert told in str(error)
    assert arguments == {}


def test_a_call_may_hold_a_whole_surrogate_pair() -> None:
    text = '{"name": "add", "arguments": {"a": "\\ud83c\\udf89"}}'
    assert parse(text, "json") == [("add", {"a": "🎉"}, None)]


def test_thinking_that_closes_again_and_again_is_thinking() -> None:
    assert split_thinking("a</think>" * 3000 + "b") == ("a" * 3000, "b")
    assert parse("</think>" * 3000 + f"<tool_call>{CALL}") == [("add", {"a": 1, "b": 2}, None)]


def test_an_unknown_parser_is_an_error_at_the_start() -> None:
    """slime#2019: it was noticed at the first call, if at all."""
    with pytest.raises(UsageError, match=r"no tool parser 'hermess'.*hermes, qwen"):
        ChatFormat(make_tokenizer("chatml"), tool_parser="hermess")


@pytest.mark.parametrize(
    ("family", "parser"), [("qwen3", "hermes"), ("llama3", "llama3"), ("smollm", "hermes")]
)
def test_auto_goes_by_the_template(family: str, parser: str) -> None:
    assert ChatFormat(make_tokenizer(family)).parser == parser


def test_tools_that_no_parser_reads_are_an_error() -> None:
    tokenizer = make_tokenizer("qwen3")
    tokenizer.chat_template = tokenizer.chat_template.replace("tool_call>", "invocation>")
    chat = ChatFormat(tokenizer)
    with pytest.raises(UsageError, match=r"rollout\.tool_parser"):
        chat.conversation(Observation("Add.", tools=(ADD_TOOL,)))


def test_a_tokenizer_without_a_template_names_the_flag() -> None:
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = None
    with pytest.raises(UsageError, match=r"--model\.chat_template"):
        ChatFormat(tokenizer)


def test_tools_come_with_the_first_observation_only() -> None:
    chat = ChatFormat(make_tokenizer("qwen3"))
    conversation = chat.conversation(Observation("Add."))
    conversation.take(generation(chat.encode("Yes.")))
    with pytest.raises(AgentError, match="from reset"):
        conversation.append(Observation("now", tools=(ADD_TOOL,)))


@pytest.mark.parametrize("system", [True, False])
def test_a_template_that_ignores_tools_gets_them_in_the_system_message(
    system: bool, caplog: pytest.LogCaptureFixture
) -> None:
    chat = ChatFormat(make_tokenizer("smollm"))
    messages = [{"role": "user", "content": "1 + 2?"}]
    if system:
        messages = [{"role": "system", "content": "Be brief."}, *messages]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            conversation = chat.conversation(Observation(messages, tools=(ADD_TOOL,)))
    first = conversation.messages[0]
    assert first["role"] == "system"
    assert first["content"].startswith("Be brief." if system else "These tools")
    assert '"name": "add"' in first["content"]
    assert "<tool_call>" in first["content"]
    assert caplog.text.count("ignores tools") == 1
    assert conversation.tools == ()


def test_a_template_without_a_system_role_gets_the_tools_in_the_first_message() -> None:
    chat = ChatFormat(make_tokenizer("strict"))
    conversation = chat.conversation(Observation("1 + 2?", tools=(ADD_TOOL,)))
    (message,) = conversation.messages
    assert message["content"].startswith("1 + 2?")
    assert '"name": "add"' in message["content"]


def test_a_template_without_a_tool_role_gets_results_as_a_user_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tokenizer = make_tokenizer("smollm")
    chat = ChatFormat(tokenizer)
    conversation = chat.conversation(Observation("1 + 2?", tools=(ADD_TOOL,)))
    action = conversation.take(generation(chat.encode(f"<tool_call>{CALL}</tool_call>")))
    results = [
        {"role": "tool", "tool_call_id": action.tool_calls[0].id, "content": "3"},
        {"role": "tool", "content": "4"},
    ]
    with caplog.at_level(logging.WARNING):
        conversation.append(Observation(results))
    assert "no form for the role tool" in caplog.text
    assert tokenizer.decode(conversation.token_ids).endswith(
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_calls_in_the_prompt_are_not_dropped_by_a_template_that_ignores_them() -> None:
    chat = ChatFormat(make_tokenizer("smollm"))
    function = {"name": "add", "arguments": {"a": 1, "b": 2}}
    conversation = chat.conversation(
        Observation(
            [
                {"role": "user", "content": "1 + 2?"},
                {"role": "assistant", "content": None, "tool_calls": [{"function": function}]},
                {"role": "tool", "content": "3"},
            ]
        )
    )
    assert conversation.messages[1]["content"] == f"<tool_call>\n{CALL}\n</tool_call>"


@pytest.mark.parametrize(
    ("content", "message"),
    [([], "no message"), ([{"content": "x"}], "not a message"), (["x"], "not a message")],
)
def test_an_observation_without_messages_is_an_error(content: list, message: str) -> None:
    with pytest.raises(AgentError, match=message):
        ChatFormat(make_tokenizer("chatml")).conversation(Observation(content))


def test_a_template_that_refuses_messages_says_what_it_was_given() -> None:
    with pytest.raises(AgentError, match=r"roles system.*unknown role system"):
        ChatFormat(make_tokenizer("strict")).conversation(
            Observation([{"role": "system", "content": "Be brief."}])
        )
