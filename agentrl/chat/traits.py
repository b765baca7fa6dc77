"""What a chat template can do, found by rendering small probes rather than by reading its source.

Many templates ignore `tools=`, drop an assistant's `tool_calls`, or write the role `tool` as if it
were a person's name. None of them says so.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import Any

from agentrl.chat.template import ChatTemplate, Schemas
from agentrl.errors import AgentError, UsageError
from agentrl.types import Message

__all__ = ["MARK", "PROBE_CALL", "PROBE_TOOLS", "TemplateTraits", "probe_traits"]

MARK = "qzassistantzq"
"""Stands for an assistant's text in probes; no template contains it."""

_USER: Message = {"role": "user", "content": "qzuserzq"}
_RESULT = "qzresultzq"
_NO_ROLE = "qzrolezq"
_VALUE = "qzvaluezq"

PROBE_TOOLS: Schemas = (
    {
        "type": "function",
        "function": {
            "name": "qztoolzq",
            "description": "A probe.",
            "parameters": {
                "type": "object",
                "properties": {"qzargumentzq": {"type": "string", "description": "Any."}},
                "required": ["qzargumentzq"],
            },
        },
    },
)

PROBE_CALL: dict[str, Any] = {
    "id": "call00000",
    "type": "function",
    "function": {"name": "qztoolzq", "arguments": {"qzargumentzq": _VALUE}},
}


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a template does.

    `system`, `tools`, `tool_calls`, `tool_role`: it renders a system message, the schemas of
    tools, an assistant's calls, and has a form of its own for a tool's result that can follow a
    sampled turn.
    `end_token_id` is the token that it writes after an assistant's turn, if it is one that never
    merges with its neighbours. `thinking_prefix` is what its generation prompt writes of the
    thinking already (`<think>` and a line break), or empty.
    """

    system: bool
    tools: bool
    tool_calls: bool
    tool_role: bool
    end_token_id: int | None
    thinking_prefix: str


def probe_traits(template: ChatTemplate) -> TemplateTraits:
    """Find out what `template` does.

    Raises:
        UsageError: it cannot render a user's and an assistant's message as they are.
    """
    end_token_id = _end_token(template)
    return TemplateTraits(
        system=_shows(
            template, [{"role": "system", "content": "qzsystemzq"}, _USER], shown="qzsystemzq"
        ),
        tools=_shows(template, [_USER], PROBE_TOOLS, shown="qzargumentzq"),
        tool_calls=_shows(
            template,
            [_USER, {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]}, _result()],
            shown=_VALUE,
        ),
        tool_role=_has_tool_role(template, end_token_id),
        end_token_id=end_token_id,
        thinking_prefix=_thinking_prefix(template),
    )


def _result(role: str = "tool") -> Message:
    return {
        "role": role,
        "content": _RESULT,
        "name": "qztoolzq",
        "tool_call_id": PROBE_CALL["id"],
    }


def _try_render(
    template: ChatTemplate, messages: SequenceABC[Message], tools: Schemas = ()
) -> str | None:
    try:
        return template.render(messages, tools, generation_prompt=False)
    except AgentError:
        return None


def _shows(
    template: ChatTemplate, messages: SequenceABC[Message], tools: Schemas = (), *, shown: str
) -> bool:
    text = _try_render(template, messages, tools)
    return text is not None and shown in text


def _has_tool_role(template: ChatTemplate, end_token_id: int | None) -> bool:
    """True when a result is not written as a message of any made-up role would be.

    It must follow an assistant's text, or where the template refuses that, a structured call whose
    turn ends before the result: elsewhere it has no place after a turn that was sampled.
    """
    plain: Message = {"role": "assistant", "content": MARK}
    calling: Message = {"role": "assistant", "content": "", "tool_calls": [PROBE_CALL]}
    end = "" if end_token_id is None else template.decode([end_token_id])
    for assistant, last in ((plain, MARK), (calling, _VALUE)):
        text = _try_render(template, [_USER, assistant, _result()])
        if text is None:
            continue
        between, shown, _ = text.rpartition(last)[2].partition(_RESULT)
        if not shown or (assistant is calling and not (end and end in between)):
            return False
        made_up = _try_render(template, [_USER, assistant, _result(_NO_ROLE)])
        return made_up is None or made_up.replace(_NO_ROLE, "tool") != text
    return False


def _end_token(template: ChatTemplate) -> int | None:
    try:
        text = template.render(
            [_USER, {"role": "assistant", "content": MARK}], generation_prompt=False
        )
    except AgentError as error:
        raise UsageError(str(error)) from error
    if text.count(MARK) != 1:
        raise UsageError(
            "the chat template does not write an assistant's text exactly once, so sampled tokens "
            "have no place in it: give another template with --model.chat_template"
        )
    after = template.encode(text.partition(MARK)[2])
    end = next((token_id for token_id in after if token_id in template.added_token_ids), None)
    history = _try_render(template, [_USER, {"role": "assistant", "content": MARK}, _USER])
    if end is None or history is None or MARK not in history:
        return end  # a template that drops the text of earlier turns is found to rewrite history
    if end not in template.encode(history.partition(MARK)[2]):
        raise UsageError(
            f"the chat template ends an assistant's turn with {template.decode([end])} only while "
            "nothing follows, so a sampled turn would not fit into the history: give another "
            "template with --model.chat_template"
        )
    return end


def _thinking_prefix(template: ChatTemplate) -> str:
    prompt = template.render([_USER], generation_prompt=True).rpartition(str(_USER["content"]))[2]
    opening = prompt.rfind("<think>")
    return prompt[opening:] if opening > prompt.rfind("</think>") else ""
