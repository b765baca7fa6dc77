"""Tools for templates that know nothing of tools.

What the template would drop is written into the messages instead: the schemas into the system
message, an assistant's calls into its text, a tool's result into a user message. The form is that
of `<tool_call>` and `<tool_response>` tags, the one that most open models have seen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from itertools import groupby
from typing import Any

from agentrl.chat.template import Schemas
from agentrl.chat.tools import ParserName
from agentrl.chat.traits import TemplateTraits
from agentrl.errors import AgentError
from agentrl.types import Message, Observation

__all__ = ["adapt_messages", "add_to_system", "describe_tools", "in_call_order", "messages_of"]


def messages_of(observation: Observation) -> list[Message]:
    """The messages of an observation that is not raw; a plain str is one user message.

    Raises:
        AgentError: it is empty, or an element is not a message.
    """
    content = observation.content
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    messages = []
    for message in content:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise AgentError(
                f"an observation holds {message!r}, which is not a message: "
                'each must be a dict with "role" and "content"'
            )
        messages.append(dict(message))
    if not messages:
        raise AgentError("an observation holds no message: return at least one, or a str")
    return messages


def in_call_order(messages: list[Message], call_ids: SequenceABC[str]) -> list[Message]:
    """`messages` with each run of tool results sorted as the calls were written.

    Results whose `tool_call_id` is not among `call_ids` keep their order, after the others.
    """
    order = {call_id: index for index, call_id in enumerate(call_ids)}
    ordered: list[Message] = []
    for is_tool, run in groupby(messages, key=lambda message: message["role"] == "tool"):
        if is_tool:
            ordered += sorted(
                run, key=lambda message: order.get(message.get("tool_call_id", ""), len(order))
            )
        else:
            ordered += run
    return ordered


def describe_tools(tools: Schemas, parser: ParserName) -> str:
    """What a model needs to know to call `tools` in the way `parser` reads."""
    schemas = "\n".join(json.dumps(dict(schema)) for schema in tools)
    if parser == "hermes":
        how = (
            "To use one, write its name and arguments as JSON between tags, like this:\n"
            '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}\n</tool_call>'
        )
    else:
        key = "parameters" if parser == "llama3" else "arguments"
        how = (
            "To use one, answer with nothing but a JSON object, like this:\n"
            f'{{"name": "NAME", "{key}": {{"ARGUMENT": VALUE}}}}'
        )
    return f"These tools are at hand:\n<tools>\n{schemas}\n</tools>\n{how}"


def adapt_messages(messages: SequenceABC[Message], traits: TemplateTraits) -> list[Message]:
    """`messages` as a template with `traits` can render them without loss."""
    adapted = list(messages)
    if not traits.tool_calls:
        adapted = [_with_calls_as_text(message) for message in adapted]
    if not traits.tool_role:
        adapted = _with_results_as_user(adapted)
    return adapted


def add_to_system(messages: list[Message], text: str, *, has_system: bool) -> list[Message]:
    """`messages` with `text` in the system message, or in the first message without one."""
    first = messages[0]
    if first["role"] == "system" or not has_system:
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _with_calls_as_text(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    parts = [message.get("content") or "", *map(_call_text, message["tool_calls"])]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(part for part in parts if part)}


def _call_text(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    # OpenAI clients carry the arguments as JSON text already.
    body = arguments if isinstance(arguments, str) else json.dumps(arguments)
    name = json.dumps(function["name"])
    return f'<tool_call>\n{{"name": {name}, "arguments": {body}}}\n</tool_call>'


def _with_results_as_user(messages: list[Message]) -> list[Message]:
    """Each run of tool results as one user message: templates want the roles to alternate."""
    adapted: list[Message] = []
    for is_tool, run in groupby(messages, key=lambda message: message["role"] == "tool"):
        if is_tool:
            results = [
                f"<tool_response>\n{message.get('content', '')}\n</tool_response>"
                for message in run
            ]
            adapted.append({"role": "user", "content": "\n".join(results)})
        else:
            adapted += run
    return adapted
