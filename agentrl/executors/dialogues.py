"""Which conversation a list of messages continues.

A client sends the whole history with every request. Where the history begins with one that was seen
before, the sampled tokens of that one are kept and only the rest is appended; where the client
rewrote it (a summary, a sub-agent), a new context begins.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from typing import Any

from agentrl.chat import ChatFormat, Conversation
from agentrl.types import Message, Observation

__all__ = ["Dialogue", "Dialogues"]


@dataclass(slots=True, eq=False)
class Dialogue:
    """A conversation, and the fingerprints of the messages that its client knows of it."""

    conversation: Conversation
    tools: str
    known: list[str] = field(default_factory=list)


class Dialogues:
    """The dialogues of one episode."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._dialogues: list[Dialogue] = []

    def find(
        self, messages: SequenceABC[Message], tools: SequenceABC[Mapping[str, Any]]
    ) -> tuple[Dialogue, Observation]:
        """The dialogue that `messages` continue the furthest, or a new one, and what they add."""
        fingerprints = [_fingerprint(message) for message in messages]
        tools_key = json.dumps([dict(tool) for tool in tools], sort_keys=True)
        continued = [
            dialogue
            for dialogue in self._dialogues
            if dialogue.tools == tools_key
            and len(dialogue.known) < len(fingerprints)
            and fingerprints[: len(dialogue.known)] == dialogue.known
        ]
        if continued:
            dialogue = max(continued, key=lambda each: len(each.known))
            return dialogue, Observation(list(messages[len(dialogue.known) :]))
        new = Dialogue(self._chat.conversation(), tools_key)
        return new, Observation(list(messages), tools=tuple(tools))

    def remember(self, dialogue: Dialogue, messages: SequenceABC[Message]) -> None:
        """Take note that the client of `dialogue` now knows exactly `messages`."""
        if dialogue not in self._dialogues:
            self._dialogues.append(dialogue)
        dialogue.known = [_fingerprint(message) for message in messages]


def _fingerprint(message: Message) -> str:
    """What makes two messages the same one; clients drop or add the other keys as they like."""
    calls = [
        {
            "name": call.get("function", call).get("name"),
            "arguments": _plain_arguments(call.get("function", call).get("arguments")),
        }
        for call in message.get("tool_calls") or ()
    ]
    return json.dumps(
        [message.get("role"), message.get("content") or "", message.get("tool_call_id"), calls],
        sort_keys=True,
        default=str,
    )


def _plain_arguments(arguments: object) -> object:
    """OpenAI clients carry arguments as JSON text, chat templates as objects."""
    if isinstance(arguments, str):
        try:
            return json.loads(arguments)
        except json.JSONDecodeError:
            return arguments
    return arguments
