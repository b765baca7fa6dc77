"""Tool agents: what the model does wrong it can mend; what a tool does wrong ends the episode."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from chat_formats import make_tokenizer
from episodes import QWEN, play, speaking

from agentrl import StopReason, UsageError
from agentrl.chat import ChatFormat
from agentrl.executors.tools import ToolAgent, ToolError, tool_schema

CALCULATOR = Path(__file__).parents[2] / "examples" / "agents" / "calculator.py"


def add(a: int, b: int = 0) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    if a == 13:
        raise ToolError("13 brings bad luck")
    if a == 14:
        raise ConnectionError("the adding service is down")
    return a + b


class Adder(ToolAgent):
    tools = (add,)

    def score(self, example, text):
        return float(text == example["answer"])


def call(arguments: str, name: str = "add") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def answers(*said: str) -> str:
    """The prompt that the policy sees after it said `said`."""
    engine = speaking(*said, "3", chat=QWEN)
    trajectory = await play(Adder, engine, {"prompt": "1 + 2?", "answer": "3"}, chat=QWEN)
    assert trajectory.stop_reason is StopReason.DONE
    assert trajectory.reward == 1.0
    return QWEN.decode(engine.calls[len(said)].token_ids)


async def test_a_call_is_answered_and_the_last_answer_scored() -> None:
    assert "<tool_response>\n3\n</tool_response>" in await answers(call('{"a": 1, "b": 2}'))


async def test_the_model_is_told_of_its_tools() -> None:
    assert '"description": "The first."' in await answers()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (call('{"a": 1', "add")[:-15], "the call is not valid JSON"),
        ("<tool_call>{}</tool_call>", "the call has no name"),
        ("<tool_call>[]</tool_call>", "the call is []"),
        ("<tool_call>null</tool_call>", "the call is null"),
        (call("{}"), "add: missing a required argument: 'a'"),
        (call('{"a": 1, "c": 2}'), "add: got an unexpected keyword argument 'c'"),
        (call('{"a": "1"}'), 'add: a must be of type integer, not "1"'),
        (call('{"a": true}'), "add: a must be of type integer, not true"),
        (call("{}", "subtract"), "there is no tool 'subtract'; there are add"),
        (call('{"a": 13}'), "13 brings bad luck"),
    ],
)
async def test_a_wrong_call_gets_an_error_to_read_and_the_episode_goes_on(
    said: str, told: str
) -> None:
    """verifiers#1763, trl#4881: malformed tool JSON ended the episode."""
    assert f"Error: {told}" in await answers(said)


async def test_the_models_mistakes_are_counted_apart_from_what_breaks() -> None:
    engine = speaking(call("{}"), call('{"a": 1}'), call('{"a": 13}'), "3", chat=QWEN)
    trajectory = await play(Adder, engine, {"prompt": "?", "answer": "3"}, chat=QWEN)
    assert trajectory.metrics == {"tool_errors": 2.0}


async def test_a_tool_that_breaks_ends_the_episode_as_its_error() -> None:
    with pytest.raises(ConnectionError, match="is down"):
        await answers(call('{"a": 14}'))


async def test_a_model_that_always_calls_is_worth_nothing() -> None:
    engine = speaking(call('{"a": 1}'), chat=QWEN)
    trajectory = await play(Adder, engine, {"prompt": "?", "answer": "3"}, chat=QWEN, max_turns=3)
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.MAX_TURNS, 0.0)


async def test_thinking_is_no_part_of_the_answer() -> None:
    engine = speaking("<think>\n4\n</think>\n\n3", chat=QWEN)
    trajectory = await play(Adder, engine, {"prompt": "?", "answer": "3"}, chat=QWEN)
    assert trajectory.reward == 1.0


async def test_what_a_tool_wrote_is_not_scored_as_the_models_answer() -> None:
    """verl#6392: the tool's result was part of the text that the reward function saw."""
    engine = speaking(call('{"a": 1, "b": 2}'), "I do not know.", chat=QWEN)
    trajectory = await play(Adder, engine, {"prompt": "?", "answer": "3"}, chat=QWEN)
    assert "<tool_response>\n3\n</tool_response>" in QWEN.decode(engine.calls[1].token_ids)
    assert trajectory.reward == 0.0
    (sequence,) = trajectory.sequences
    assert "tool_response" not in QWEN.decode(sequence.token_ids[sequence.response_mask].tolist())


@pytest.mark.parametrize("body", ['{"a": 1', "{}", "[]", "null", "[" * 5000, "9" * 5000])
async def test_a_body_that_is_no_call_is_answered_and_the_episode_goes_on(body: str) -> None:
    """verifiers#1763, trl#4881: literally, and what else a model may write."""
    engine = speaking(f"<tool_call>{body}</tool_call>", "3", chat=QWEN)
    example = {"prompt": "?", "answer": "3"}
    limits = {"max_tokens": 100_000, "max_new_tokens": 50_000}
    trajectory = await play(Adder, engine, example, chat=QWEN, **limits)
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.DONE, 1.0)
    assert "Error: the call" in QWEN.decode(engine.calls[1].token_ids)


def test_a_tool_without_a_description_is_an_error_at_once() -> None:
    def bare(a):
        return a

    with pytest.raises(UsageError, match=r"bare.*docstring"):
        tool_schema(bare)


async def test_the_calculator_works_with_a_template_that_ignores_tools() -> None:
    agent = runpy.run_path(str(CALCULATOR))
    chat = ChatFormat(make_tokenizer("smollm"))
    (example, *_) = agent["examples"]("test")
    expression = example["prompt"].removeprefix("What is ").removesuffix("?")
    said = call(f'{{"expression": "{expression}"}}', "calculate")
    engine = speaking(said, f"The answer is {example['answer']}.", chat=chat)
    trajectory = await play(agent["Calculator"], engine, example, chat=chat)
    assert trajectory.reward == 1.0
    assert f"<tool_response>\n{example['answer']}\n" in chat.decode(engine.calls[1].token_ids)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(3 + 4) * -5", "-35"),
        ("1 / 4", "0.25"),
        ("2 * 3.5", "7.0"),
        ("12345678 * 10", "123456780"),
    ],
)
def test_the_calculator_calculates(expression: str, value: str) -> None:
    assert runpy.run_path(str(CALCULATOR))["calculate"](expression) == value


@pytest.mark.parametrize(
    "expression",
    ["1 +", "__import__('os')", "2 ** 99", "1 / 0", "True", "'a' * 9", "(" * 150, "1" * 300, "\0"],
)
def test_the_calculator_refuses_what_is_not_arithmetic(expression: str) -> None:
    agent = runpy.run_path(str(CALCULATOR))
    with pytest.raises(ToolError):
        agent["calculate"](expression)


def test_the_calculators_questions_do_not_change() -> None:
    examples = runpy.run_path(str(CALCULATOR))["examples"]
    assert examples("train") == examples("train")
    assert len({row["id"] for split in ("train", "test") for row in examples(split)}) == 320
    for row in examples("test"):
        assert eval(row["prompt"].removeprefix("What is ").removesuffix("?")) == row["answer"]
