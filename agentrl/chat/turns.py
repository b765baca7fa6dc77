"""What a template writes between the end of one assistant turn and the start of the next.

That piece does not depend on the history in a template that only appends, so it is rendered after
a fixed short history, and the literal text around the messages' contents is remembered: a turn
then costs one tokenization and no rendering. Where a template transforms the contents (escapes
them, say) the piece is rendered anew each time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

from agentrl.chat.template import ChatTemplate, Schemas
from agentrl.chat.traits import MARK, PROBE_CALL
from agentrl.errors import AgentError
from agentrl.types import Message

__all__ = ["TurnRenderer"]

_MAX_SHAPES = 1024
# Whatever a template might escape, strip or quote, so that literal text is known to be literal.
_PADDING = " \n\t\"'<&>\\{}é"


@dataclass(frozen=True, slots=True)
class _Literals:
    """The text around n contents: n + 1 pieces. `strip`: the template strips each content."""

    pieces: tuple[str, ...]
    strip: bool

    def fill(self, contents: SequenceABC[str]) -> str:
        parts = [self.pieces[0]]
        for content, piece in zip(contents, self.pieces[1:], strict=True):
            parts += (content.strip() if self.strip else content, piece)
        return "".join(parts)


class TurnRenderer:
    """Renders the text from the end of an assistant's content up to the next generation prompt."""

    def __init__(self, template: ChatTemplate, end_token_id: int | None) -> None:
        self._template = template
        self._end_token_id = end_token_id
        self._shapes: dict[object, _Literals | None] = {}

    def text(self, messages: SequenceABC[Message], tools: Schemas = ()) -> str:
        """The end of the turn before, `messages`, and the generation prompt.

        Raises:
            AgentError: the template refuses `messages` after an assistant turn.
        """
        shape = _shape(messages, tools)
        if shape is None:
            return self._render(messages, tools)
        if shape not in self._shapes:
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            self._shapes[shape] = self._find_literals(messages, tools)
        literals = self._shapes[shape]
        if literals is None:
            return self._render(messages, tools)
        return literals.fill([message["content"] for message in messages])

    def _render(self, messages: SequenceABC[Message], tools: Schemas) -> str:
        user: Message = {"role": "user", "content": "qzuserzq"}
        answer: Message = {"role": "assistant", "content": MARK}
        try:
            text = self._template.render([user, answer, *messages], tools, generation_prompt=True)
        except AgentError:
            # Some templates take a tool's result only after a call of that tool.
            if not any(message["role"] == "tool" for message in messages):
                raise
            return self._render_after_calls(messages, tools)
        return _after_mark(text)

    def _render_after_calls(self, messages: SequenceABC[Message], tools: Schemas) -> str:
        calls = [
            {
                **PROBE_CALL,
                "id": message.get("tool_call_id", PROBE_CALL["id"]),
                "function": {"name": message.get("name", "f"), "arguments": {"a": MARK}},
            }
            for message in messages
            if message["role"] == "tool"
        ]
        user: Message = {"role": "user", "content": "qzuserzq"}
        answer: Message = {"role": "assistant", "content": "", "tool_calls": calls}
        history = [user, answer, *messages]
        text = _after_mark(self._template.render(history, tools, generation_prompt=True))
        end = "" if self._end_token_id is None else self._template.decode([self._end_token_id])
        if not end or end not in text:
            raise AgentError(
                "the chat template takes a tool's result only after a structured call and does "
                "not end the turn between them: give another with --model.chat_template"
            )
        return text[text.index(end) :]

    def _find_literals(self, messages: SequenceABC[Message], tools: Schemas) -> _Literals | None:
        """The literal text around the contents; None where the template transforms them."""
        marks = [f"qzcontent{index}zq" for index in range(len(messages))]
        padded = [f"{_PADDING}{mark}{_PADDING}" for mark in marks]
        pieces: list[str] = []
        rest = self._render(_with_contents(messages, marks), tools)
        for mark in marks:
            piece, found, rest = rest.partition(mark)
            if not found:
                raise AgentError(
                    "the chat template leaves out one of the messages with the roles "
                    f"{', '.join(message['role'] for message in messages)}, so the model would "
                    "not see it: give it another role, or another template with "
                    "--model.chat_template"
                )
            if mark in rest:
                return None
            pieces.append(piece)
        shown = self._render(_with_contents(messages, padded), tools)
        for strip in (False, True):
            literals = _Literals((*pieces, rest), strip)
            if literals.fill(padded) == shown:
                return literals
        return None


def _after_mark(text: str) -> str:
    return text.rpartition(MARK)[2]


def _with_contents(messages: SequenceABC[Message], contents: SequenceABC[str]) -> list[Message]:
    return [
        {**message, "content": content} for message, content in zip(messages, contents, strict=True)
    ]


def _shape(messages: SequenceABC[Message], tools: Schemas) -> object | None:
    """Everything but the contents; None where a message holds more than text.

    An assistant's message is rendered anew: templates look into its text for thinking and calls.
    """
    rest: list[object] = [json.dumps(tools) if tools else ""]
    for message in messages:
        if message["role"] == "assistant":
            return None
        if not all(isinstance(value, str) for value in message.values()):
            return None
        if "content" not in message:
            return None
        rest.append(tuple(sorted((k, v) for k, v in message.items() if k != "content")))
    return tuple(rest)
