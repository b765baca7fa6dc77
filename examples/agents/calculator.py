"""Arithmetic with a calculator: a tool agent for a real instruct model.

    agentrl eval --agent examples/agents/calculator.py --model.path <folder or .gguf file>

The model may call `calculate` as often as it likes; the reward is 1 if the last number of its final
answer is right. Templates that know nothing of tools (SmolLM2) work: the tool is then described in
the system message.
"""

import ast
import operator
import random
import re

import agentrl as rl
from agentrl import ToolAgent, ToolError

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
MAX_LENGTH = 200


def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression with + - * / and brackets.

    Args:
        expression: The expression, for example (3 + 4) * 5
    """
    if len(expression) > MAX_LENGTH:
        raise ToolError(f"the expression is longer than {MAX_LENGTH} characters")
    try:
        value = evaluate(ast.parse(expression, mode="eval").body)
    except (SyntaxError, ValueError) as error:
        raise ToolError(
            f"{expression!r} is not an expression: {getattr(error, 'msg', error)}"
        ) from error
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except (OverflowError, RecursionError, MemoryError) as error:
        raise ToolError("the expression is too large") from error
    return str(round(value, 10)) if isinstance(value, float) else str(value)


def evaluate(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](evaluate(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](evaluate(left), evaluate(right))
        case _:
            raise ToolError(f"{ast.unparse(node)} is not allowed: use numbers and + - * /")


class Calculator(ToolAgent):
    """One question, any number of calculations, one answer."""

    tools = (calculate,)
    system_prompt = "You solve arithmetic problems. Finish with the number alone."

    def score(self, example: rl.Example, text: str) -> float:
        numbers = NUMBER.findall(text)
        return float(bool(numbers) and float(numbers[-1].replace(",", "")) == example["answer"])


def examples(split: str) -> list[rl.Example]:
    """The same questions every time, drawn anew for each split."""
    rng = random.Random(f"calculator/{split}")
    rows = []
    for index in range(256 if split == "train" else 64):
        a, b, c = rng.randint(2, 99), rng.randint(2, 99), rng.randint(2, 20)
        sign = rng.choice("+-")
        expression = f"({a} {sign} {b}) * {c}"
        rows.append(
            {
                "id": f"{split}-{index}",
                "prompt": f"What is {expression}?",
                "answer": (a + b if sign == "+" else a - b) * c,
            }
        )
    return rows
