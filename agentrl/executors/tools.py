"""Agents that answer with the help of tools, which are plain Python functions.

A tool's schema comes from its signature and docstring. What the model does wrong (a call that
cannot be read, an unknown tool, wrong arguments) is answered with an error that the model reads,
and the episode goes on; what the tool itself does wrong ends it as an error of the environment.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceABC
from functools import lru_cache
from typing import Any

from agentrl.chat import split_thinking
from agentrl.errors import AgentError, UsageError
from agentrl.executors.base import AgentInstance
from agentrl.types import Action, Example, Message, Observation, StepResult, ToolCall

__all__ = ["Tool", "ToolAgent", "ToolError", "tool_schema"]

Tool = Callable[..., Any]
"""A plain function with type hints and a docstring that describes every argument."""

_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


class ToolError(Exception):
    """Raised by a tool for something that the model should read and mend."""


class ToolAgent(AgentInstance):
    """Subclass it, name the `tools`, and write `score`.

    The episode ends when the model answers without a call; its reward is the score of that answer.
    Turns that call tools have reward 0, so that an episode that never answers is worth 0. The
    metric `tool_errors` counts the calls of the episode that were answered with an error.

    Attributes:
        tools: plain functions; `__init__` may set bound methods where tools share state.
        system_prompt: the first message, if any.
    """

    tools: SequenceABC[Tool] = ()
    system_prompt: str | None = None

    def prompt(self, example: Example) -> str | list[Message]:
        """The question; by default the field `prompt` of the example."""
        if "prompt" not in example:
            raise AgentError(
                f"the example has the fields {', '.join(map(repr, example))} and not 'prompt': "
                f"define prompt(self, example) in {type(self).__name__}"
            )
        prompt: str | list[Message] = example["prompt"]
        return prompt

    def score(self, example: Example, text: str) -> float | None:
        """The reward of the final answer `text`, thinking left out; None: cannot be scored."""
        raise NotImplementedError(f"{type(self).__name__} must define score(self, example, text)")

    def reset(self, example: Example) -> Observation:
        """The question, and the schemas of the tools."""
        self._example = example
        self._tools = {tool.__name__: tool for tool in self.tools}
        self._schemas = {name: tool_schema(tool) for name, tool in self._tools.items()}
        self._num_errors = 0
        prompt = self.prompt(example)
        messages: list[Message] = []
        if self.system_prompt is not None:
            messages.append({"role": "system", "content": self.system_prompt})
        messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return Observation(messages, tools=tuple(self._schemas.values()))

    def step(self, action: Action) -> StepResult:
        """Answer the calls, or score the final answer."""
        if not action.tool_calls:
            answer = split_thinking(action.text)[1].strip()
            return StepResult(
                reward=self.score(self._example, answer), done=True, metrics=self._metrics()
            )
        results: list[Message] = [
            {
                "role": "tool",
                "name": call.name or "unknown",
                "tool_call_id": call.id,
                "content": self._answer(call),
            }
            for call in action.tool_calls
        ]
        return StepResult(observation=results, reward=0.0, metrics=self._metrics())

    def _metrics(self) -> dict[str, float]:
        return {"tool_errors": float(self._num_errors)}

    def _answer(self, call: ToolCall) -> str:
        try:
            result = self._call(call)
        except ToolError as error:
            self._num_errors += 1
            return f"Error: {error}"
        return result if isinstance(result, str) else json.dumps(result, default=str)

    def _call(self, call: ToolCall) -> Any:
        if call.error is not None:
            raise ToolError(call.error)
        tool = self._tools.get(call.name)
        if tool is None:
            raise ToolError(f"there is no tool {call.name!r}; there are {', '.join(self._tools)}")
        mistake = _mistake(tool, self._schemas[call.name], call.arguments)
        if mistake is not None:
            raise ToolError(mistake)
        return tool(**call.arguments)


def tool_schema(tool: Tool) -> Mapping[str, Any]:
    """The JSON schema of a tool, as chat templates take it.

    Raises:
        UsageError: it lacks a type hint, or a description of itself or of an argument; or it is
            `async def`.
    """
    # A bound method must not outlive its instance in the cache.
    return _make_schema(tool) if inspect.ismethod(tool) else _cached_schema(tool)


def _make_schema(tool: Tool) -> Mapping[str, Any]:
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
    )

    if inspect.iscoroutinefunction(tool):
        raise UsageError(f"the tool {tool.__name__} is async: write it as a plain function")
    try:
        schema: Mapping[str, Any] = get_json_schema(tool)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise UsageError(
            f"the tool {tool.__name__} cannot be described to the model: {error}; give every "
            "argument a type hint and a line under Args: in the docstring"
        ) from error
    return schema


_cached_schema = lru_cache(maxsize=256)(_make_schema)


def _mistake(tool: Tool, schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> str | None:
    """What is wrong with the arguments of a call; None if nothing is."""
    try:
        inspect.signature(tool).bind(**arguments)
    except TypeError as error:
        return f"{tool.__name__}: {error}"
    properties = schema["function"]["parameters"].get("properties", {})
    for name, value in arguments.items():
        wanted = properties.get(name, {}).get("type")
        types = _JSON_TYPES.get(wanted) if isinstance(wanted, str) else None
        is_flag = isinstance(value, bool) and wanted != "boolean"
        if types is not None and value is not None and (is_flag or not isinstance(value, types)):
            return f"{tool.__name__}: {name} must be of type {wanted}, not {json.dumps(value)}"
    return None
