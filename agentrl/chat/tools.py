"""Reading tool calls, and thinking, out of what a model wrote.

A parser is a convention of how a model writes a call:

- `hermes` (and `qwen`, the same): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`
- `llama3`: `{"name": ..., "parameters": {...}}`, alone or after `<|python_tag|>`
- `json`: a bare JSON object, or a list of them, in a code fence or not
- `none`: nothing is a call

What stands inside `<think>` is never a call. A call that cannot be read becomes a `ToolCall` with
`error` set, so that the model can be told. (transformers' own `parse_response` needs a response
template, which most tokenizers lack, and it raises where a call cannot be read.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

from agentrl.errors import UsageError
from agentrl.types import ToolCall

__all__ = ["ParserName", "parse_tool_calls", "resolve_parser", "split_calls", "split_thinking"]

ParserName = Literal["none", "hermes", "llama3", "json", "unknown"]

_NAMES = ("auto", "none", "hermes", "qwen", "llama3", "json")
_THINKING = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FENCED = re.compile(r"\A```(?:json)?\s*(.*?)\s*(?:```)?\Z", re.DOTALL)
_CALL_NAME = re.compile(r'"name"\s*:\s*"([^"]*)"')
_PYTHON_TAG = "<|python_tag|>"
_MAX_DEPTH = 64
"""Levels of nesting in a call: more would exhaust Python's recursion in whatever walks it."""


def resolve_parser(name: str, template_source: str, *, template_renders_tools: bool) -> ParserName:
    """The parser for `rollout.tool_parser`; `auto` goes by what the chat template mentions.

    `unknown` is a template that renders tools in a way no parser here reads: an error only when
    an agent offers tools.

    Raises:
        UsageError: there is no parser of that name.
    """
    match name:
        case "hermes" | "qwen":
            return "hermes"
        case "none" | "llama3" | "json":
            return name
        case "auto":
            pass
        case _:
            raise UsageError(
                f"there is no tool parser {name!r}: set rollout.tool_parser to one of "
                f"{', '.join(_NAMES)}"
            )
    if not template_renders_tools:
        return "hermes"
    if "<tool_call>" in template_source and "<function=" not in template_source:
        return "hermes"
    if _PYTHON_TAG in template_source or (
        "<|start_header_id|>" in template_source and '"parameters"' in template_source
    ):
        return "llama3"
    return "unknown"


def split_thinking(text: str) -> tuple[str, str]:
    """(thinking, the rest). A `</think>` without an opening closes what the prompt opened."""
    thoughts, rest = [], text
    while True:
        head, closing, tail = rest.partition("</think>")
        if not closing or "<think>" in head:
            break
        thoughts.append(head)
        rest = tail
    thoughts += _THINKING.findall(rest)
    return "".join(thoughts), _THINKING.sub("", rest)


def parse_tool_calls(text: str, parser: ParserName, *, id_prefix: str) -> tuple[ToolCall, ...]:
    """The calls in `text`, in order; their ids are `id_prefix` and their index."""
    if parser in ("none", "unknown"):
        return ()
    _, visible = split_thinking(text)
    calls = (call for snippet in split_calls(visible, parser)[1] for call in _read_snippet(snippet))
    return tuple(
        ToolCall(name, arguments, id=f"{id_prefix}{index}", error=error)
        for index, (name, arguments, error) in enumerate(calls)
    )


def split_calls(visible: str, parser: ParserName) -> tuple[str, list[str]]:
    """(text without calls, the text of each call) of what stands outside the thinking."""
    if parser == "hermes":
        if "<tool_call>" not in visible:
            return visible, []
        return _TAGGED.sub("", visible).strip(), _TAGGED.findall(visible)
    if parser == "llama3":
        before, tag, tagged = visible.partition(_PYTHON_TAG)
        if tag:
            return before.strip(), [tagged]
        return ("", [visible]) if visible.lstrip().startswith("{") else (visible, [])
    if parser == "json":
        fenced = _FENCED.match(visible.strip())
        bare = fenced.group(1) if fenced else visible.strip()
        if bare.startswith(("{", "[")) or bare == "null":
            return "", [bare]
    return visible, []


_Read = tuple[str, dict[str, Any], str | None]


def _read_snippet(snippet: str) -> Iterator[_Read]:
    """The calls of one snippet: JSON values one after another, `;` between them allowed."""
    rest = snippet.strip()
    if not rest:
        yield "", {}, "the call is empty: write a JSON object with name and arguments"
    while rest:
        try:
            value, end = _decode(rest)
        except ValueError as error:
            name = _CALL_NAME.search(rest)
            yield name.group(1) if name else "", {}, f"the call is not valid JSON: {error}"
            return
        if isinstance(value, list) and value:
            yield from map(_read_call, value)
        else:
            yield _read_call(value)
        rest = rest[end:].lstrip(" \t\r\n;")


def _read_call(value: object) -> _Read:
    if not isinstance(value, dict):
        return (
            "",
            {},
            f"the call is {json.dumps(value)}: write a JSON object with name and arguments",
        )
    value = value.get("function", value) if isinstance(value.get("function"), dict) else value
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return "", {}, "the call has no name: write a JSON object with name and arguments"
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments, _ = _decode(arguments.strip(), whole=True)
        except ValueError as error:
            return name, {}, f"the arguments are not valid JSON: {error}"
    if not isinstance(arguments, dict):
        return name, {}, f"the arguments are {json.dumps(arguments)}: write a JSON object"
    return name, arguments, None


def _decode(text: str, *, whole: bool = False) -> tuple[Any, int]:
    """The JSON value that `text` begins with, and where it ends.

    Raises:
        ValueError: there is none, more follows although it should be the `whole` text, or it is
            one that no tool can work with.
    """
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except RecursionError:
        value, end = None, -1
    if end < 0 or _is_deep(value):
        raise ValueError(f"it nests deeper than {_MAX_DEPTH} levels")
    if whole and end < len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    # Half of a surrogate pair is valid JSON, but neither text nor anything to tokenize.
    json.dumps(value, ensure_ascii=False).encode()
    return value, end


def _is_deep(value: object) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            child
            for each in level
            for child in (
                each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
            )
        ]
        if not level:
            return False
    return True
