"""Whether a chat template rewrites history: found by holding short dialogues, once per format.

A dialogue that a template only appends to stays one sequence; one that it rewrites (dropping
earlier thinking, moving the tools to the newest message) forks. So the probe is a `Conversation`
that follows the template.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from agentrl.chat.conversation import Conversation
from agentrl.chat.traits import PROBE_TOOLS
from agentrl.errors import AgentError
from agentrl.types import Generation, Message, Observation

if TYPE_CHECKING:
    from agentrl.chat.format import ChatFormat

__all__ = ["find_rewrites"]

_CALL = '<tool_call>\n{"name": "qztoolzq", "arguments": {"qzargumentzq": "a"}}\n</tool_call>'


def find_rewrites(chat: ChatFormat) -> tuple[str, ...]:
    """The kinds of dialogue whose history the template rewrites; empty for one that appends."""
    thought = "a\n</think>\n\n" if chat.thinking_prefix else "<think>\na\n</think>\n\n"
    # Under a prompt that opens the thinking, an answer without any would not be a dialogue.
    plain = thought if chat.thinking_prefix else ""
    users: list[Message] = [{"role": "user", "content": "b"}]
    results: list[Message] = [
        {"role": "tool", "name": "qztoolzq", "tool_call_id": f"call0000{index}", "content": "c"}
        for index in range(2)
    ]
    dialogues = {"turns": (f"{plain}d", users), "thinking": (f"{thought}d", users)}
    if chat.traits.tool_role:
        dialogues["tool results"] = (f"{plain}{_CALL}", results)
        dialogues["thinking before tool results"] = (f"{thought}{_CALL}", results)
    return tuple(
        name for name, (said, messages) in dialogues.items() if _rewrites(chat, said, messages)
    )


def _rewrites(chat: ChatFormat, said: str, messages: list[Message]) -> bool:
    """Hold a dialogue of three turns; True if it did not stay one sequence."""
    tools = PROBE_TOOLS if messages[0]["role"] == "tool" and chat.traits.tools else ()
    conversation = Conversation(chat, follow_template=True)
    generation = _generation(chat.encode(said))
    try:
        conversation.append(Observation("a", tools=tools))
        for _ in range(2):
            conversation.take(generation)
            conversation.append(Observation(messages))
        conversation.take(generation)
    except AgentError:
        # A template that refuses this dialogue does not rewrite it.
        return False
    return len(conversation.sequences()) > 1


def _generation(token_ids: list[int]) -> Generation:
    return Generation(
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=None,
        weight_versions=np.zeros(len(token_ids), dtype=np.int32),
        finish_reason="stop",
    )
