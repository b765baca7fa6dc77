"""Prompt and label of a row, as OpenRLHF's agent files get them: rendered text, and anything."""

from __future__ import annotations

from typing import Any

from agentrl.chat import ChatFormat
from agentrl.config import DataConfig
from agentrl.errors import UsageError
from agentrl.types import Example

__all__ = ["label_of", "prompt_of"]


def prompt_of(example: Example, data: DataConfig, chat: ChatFormat) -> str:
    """The field `data.prompt_key`: text as it is, messages as the chat template renders them.

    Raises:
        UsageError: the row has no such field.
    """
    if data.prompt_key not in example:
        raise UsageError(
            f"the row has the fields {', '.join(map(repr, example))} and not "
            f"{data.prompt_key!r}: name the one with the prompt with --data.prompt_key"
        )
    prompt = example[data.prompt_key]
    return prompt if isinstance(prompt, str) else chat.render(list(prompt))


def label_of(example: Example, data: DataConfig) -> Any:
    """The field `data.label_key`; None in a row without it."""
    return example.get(data.label_key)
