"""A tokenizer and its chat template: messages to text, text to ids, ids to text.

Everything that is tokenized passes here, once, without special tokens added: what the template
writes is what the model sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceABC
from functools import lru_cache
from typing import Any

from agentrl.errors import AgentError, UsageError
from agentrl.types import Message

__all__ = ["ChatTemplate", "Schemas"]

Schemas = tuple[Mapping[str, Any], ...]
"""JSON schemas of tools, as chat templates take them."""

_CACHED_TEXT = 2048
"""Characters of the longest text whose ids are remembered: feedback repeats, essays do not."""


class ChatTemplate:
    """Renders and tokenizes for one tokenizer.

    Attributes:
        source: the template's own text (all of them, where the tokenizer has several).
        added_token_ids: ids of the tokens that the tokenizer never merges with their neighbours.

    Raises:
        UsageError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        template = tokenizer.chat_template
        if not template:
            raise UsageError(
                "the tokenizer has no chat template: give one with --model.chat_template FILE, "
                "or use an instruction-tuned model"
            )
        self.source = "\n".join(template.values()) if isinstance(template, dict) else str(template)
        self.added_token_ids = frozenset(
            token_id
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.content.strip()
        )
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self._tokenizer = tokenizer
        self._encode, self._decode = _codec(tokenizer)
        self._encode_short = lru_cache(maxsize=4096)(lambda text: tuple(self._encode(text)))

    def render(
        self,
        messages: SequenceABC[Message],
        tools: Schemas = (),
        *,
        generation_prompt: bool,
    ) -> str:
        """The template's text of `messages`.

        Raises:
            AgentError: the template refuses them.
        """
        # Not at the top: agent files import this module, and jinja2 is slow to import.
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=generation_prompt,
            )
        except (TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise AgentError(
                f"the chat template cannot render messages with the roles {roles}: {error}; "
                "change the messages, or give another template with --model.chat_template"
            ) from error
        return str(text)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special tokens written in it become their ids, none are added.

        Raises:
            AgentError: the text holds half of a surrogate pair, which is no character.
        """
        try:
            if len(text) <= _CACHED_TEXT:
                return list(self._encode_short(text))
            return self._encode(text)
        except (TypeError, UnicodeEncodeError) as error:
            raise AgentError(
                "the agent's text cannot be tokenized: it must be a str without lone surrogates "
                "(decode bytes with errors='replace')"
            ) from error

    def decode(self, token_ids: SequenceABC[int]) -> str:
        """Text of `token_ids`, special tokens included."""
        return self._decode(token_ids)


def _codec(
    tokenizer: Any,
) -> tuple[Callable[[str], list[int]], Callable[[SequenceABC[int]], str]]:
    """The tokenizer's encode and decode, without the wrapper's overhead where it is a fast one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return (
            lambda text: list(tokenizer.encode(text, add_special_tokens=False)),
            lambda token_ids: str(
                tokenizer.decode(
                    token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
                )
            ),
        )
    # A tokenizer file may carry settings for batches of texts; a context is never cut or padded.
    backend.no_truncation()
    backend.no_padding()
    return (
        lambda text: list(backend.encode(text, add_special_tokens=False).ids),
        lambda token_ids: str(backend.decode(list(token_ids), skip_special_tokens=False)),
    )
