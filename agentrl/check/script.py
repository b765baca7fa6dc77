"""What the scripted engine says in a check: turns such as a model might write.

Answers in prose and as a number, a call of an offered tool, a call whose JSON is broken, and a turn
that the token limit cuts. A turn that nothing else can end goes on with words after its answer.
They depend on the episode and the turn alone.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceABC
from typing import TYPE_CHECKING, Any

from agentrl.types import SamplingParams

if TYPE_CHECKING:
    from agentrl.chat import ChatFormat

__all__ = ["CheckScript"]

ANSWERS = ("1", "yes", "I do not know.", "The answer is 42.")
CUT_ANSWER = "word "
EXAMPLE_VALUES: Mapping[str, Any] = {
    "string": "1",
    "number": 1.0,
    "integer": 1,
    "boolean": True,
    "array": [],
    "object": {},
}


class CheckScript:
    """A script of `ScriptedEngine`.

    Args:
        chat: whose end-of-turn token ends a turn.
        tools: the tools that the agent has offered so far, as `reset` returned them.
        cut_rollout: the episode whose first turn is cut by the token limit.
    """

    def __init__(
        self,
        chat: ChatFormat,
        tools: Callable[[], SequenceABC[Mapping[str, Any]]],
        cut_rollout: str,
    ) -> None:
        self._chat = chat
        self._tools = tools
        self._cut_rollout = cut_rollout
        end = chat.traits.end_token_id
        self._end = min(chat.end_token_ids) if end is None else end
        self._turns: Counter[str] = Counter()

    def __call__(
        self, token_ids: SequenceABC[int], params: SamplingParams, rollout_id: str
    ) -> list[int]:
        """The next turn of an episode."""
        turn = self._turns[rollout_id]
        self._turns[rollout_id] += 1
        piece = self._chat.encode(CUT_ANSWER)
        filling = piece * (params.max_new_tokens // len(piece) + 1)
        if rollout_id == self._cut_rollout and turn == 0:
            return filling
        tools = self._tools()
        turns = [*(_calls(tools[0], self._chat.parser) if tools else ()), *ANSWERS]
        said = [*self._chat.encode(turns[turn % len(turns)]), self._end]
        # `ignore_eos` has a model go on after its answer's end.
        return said if params.stop_token_ids else said + filling


def _calls(tool: Mapping[str, Any], parser: str) -> tuple[str, str]:
    """A call of a tool with arguments of the right types, and one that breaks off."""
    function = tool.get("function", tool)
    properties = function.get("parameters", {}).get("properties", {})
    arguments = {
        name: EXAMPLE_VALUES.get(schema.get("type", "string"), "1")
        for name, schema in properties.items()
    }
    key = "parameters" if parser == "llama3" else "arguments"
    call = json.dumps({"name": function.get("name", ""), key: arguments})
    before, after = ("<tool_call>\n", "\n</tool_call>") if parser == "hermes" else ("", "")
    return f"{before}{call}{after}", f"{before}{call[:-1]}{after}"
