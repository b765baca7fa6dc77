"""The agent that `learning.py` trains: arithmetic with a calculator that does one operation a call.

Half of the questions are answered with one call. The others have a second part, which is asked
when the first answer is right and needs its result: four turns. A chat model of 135M parameters
copies the form of a call from the conversations that it is shown, but often calls nothing, or calls
the wrong thing. The numbers have three digits, so that it cannot answer without the tool.
"""

from __future__ import annotations

import operator
import random
import re
from typing import Any

from agentrl import Action, Example, Observation, StepResult, ToolAgent, ToolError

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
OPERATION = re.compile(r"\s*(-?\d{1,12})\s*([-+*])\s*(-?\d{1,12})\s*")
NUMBER = re.compile(r"-?\d+")
SHOWN = ((412, "+", 230, 14), (71, "-", 26, None))
"""What the conversations before the question are about."""


def calculate(expression: str) -> str:
    """Work out one operation (+, - or *) on two whole numbers.

    Args:
        expression: The operation, for example 12 + 30
    """
    match = OPERATION.fullmatch(expression)
    if match is None:
        raise ToolError("write one operation on two whole numbers, for example 12 + 30")
    left, sign, right = match.groups()
    return str(OPERATORS[sign](int(left), int(right)))


class TwoPartArithmetic(ToolAgent):
    """One question, or two that follow each other; reward 1 where the last answer is right."""

    tools = (calculate,)
    system_prompt = "You answer questions with a calculator."

    def prompt(self, example: Example) -> list[dict[str, Any]]:
        """The conversations that show how, then the question."""
        shown = [message for numbers in SHOWN for message in conversation(*numbers)]
        return [*shown, {"role": "user", "content": example["questions"][0]}]

    def reset(self, example: Example) -> Observation:
        """Begin with the first part."""
        self._part = 0
        return super().reset(example)

    def score(self, example: Example, text: str) -> float:
        """1 where the last number is the answer to the part that was asked."""
        numbers = NUMBER.findall(text)
        return float(bool(numbers) and int(numbers[-1]) == example["answers"][self._part])

    def step(self, action: Action) -> StepResult:
        """Answer the calls; after a right answer, ask the second part if there is one."""
        result = super().step(action)
        questions = self._example["questions"]
        if not result.done or result.reward != 1 or self._part + 1 == len(questions):
            return result
        self._part += 1
        return StepResult(questions[self._part], reward=0.0)


def questions(a: int, sign: str, b: int, c: int | None) -> list[str]:
    """Ask for a `sign` b, and for its product with c if there is one."""
    return [f"What is {a} {sign} {b}?", *([] if c is None else [f"Multiply that by {c}."])]


def answers(a: int, sign: str, b: int, c: int | None) -> list[int]:
    """Of the same questions."""
    first = OPERATORS[sign](a, b)
    return [first, *([] if c is None else [first * c])]


def conversation(a: int, sign: str, b: int, c: int | None) -> list[dict[str, Any]]:
    """How such questions are answered with the calculator."""
    expressions = [f"{a} {sign} {b}", f"{OPERATORS[sign](a, b)} * {c}"]
    parts = zip(questions(a, sign, b, c), expressions, answers(a, sign, b, c), strict=False)
    return [message for part in parts for message in _answered(*part)]


def _answered(asked: str, expression: str, answer: int) -> list[dict[str, Any]]:
    function = {"name": "calculate", "arguments": {"expression": expression}}
    call = {"type": "function", "function": function}
    return [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "calculate", "content": str(answer)},
        {"role": "assistant", "content": f"The answer is {answer}."},
    ]


def examples(split: str) -> list[Example]:
    """8,192 questions to train on, 512 held out; the same every time."""
    rng = random.Random(f"two-part arithmetic/{split}")
    rows = []
    for index in range(8192 if split == "train" else 512):
        a, b, sign = rng.randint(100, 999), rng.randint(100, 999), rng.choice("+-")
        numbers = (a, sign, b, rng.randint(12, 99) if index % 2 else None)
        rows.append(
            {
                "id": f"{split}-{index}",
                "questions": questions(*numbers),
                "answers": answers(*numbers),
            }
        )
    return rows
