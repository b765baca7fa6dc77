"""The text of every single token, for a reader to look at.

Decoding a token alone loses what its neighbours give it: SentencePiece drops a leading space, and
byte-level tokens may hold a part of a character. Here a token is decoded behind an ordinary one,
and tokens that share a character are decoded together, the text going to the first of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["TokenText", "Tokenizer"]

_BROKEN = "\ufffd"
_LONGEST_CHARACTER = 4
"""Bytes of a UTF-8 character at most, so tokens that can share one."""


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Text to ids."""

    def decode(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str:
        """Ids to text."""


class TokenText:
    """Calls give one text per token id; a token is decoded once in a process."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor = tokenizer.encode("a", add_special_tokens=False)
        self._anchor_text = self._decode(self._anchor)
        self._known: dict[int, str] = {}

    def __call__(self, token_ids: Sequence[int]) -> list[str]:
        """Return as many texts as ids; a token whose character began before it has none."""
        texts = [self._single(token_id) for token_id in token_ids]
        start = 0
        while start < len(texts):
            width = self._shared(token_ids, texts, start) if _BROKEN in texts[start] else 1
            if width > 1:
                texts[start] = self._text(token_ids[start : start + width])
                texts[start + 1 : start + width] = [""] * (width - 1)
            start += width
        return texts

    def _shared(self, token_ids: Sequence[int], texts: Sequence[str], start: int) -> int:
        """How many tokens from `start` make whole characters together; 1 if none do."""
        for width in range(2, _LONGEST_CHARACTER + 1):
            if start + width > len(texts) or _BROKEN not in texts[start + width - 1]:
                break
            if _BROKEN not in self._text(token_ids[start : start + width]):
                return width
        return 1

    def _single(self, token_id: int) -> str:
        if token_id not in self._known:
            self._known[token_id] = self._text([token_id])
        return self._known[token_id]

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._decode([*self._anchor, *token_ids]).removeprefix(self._anchor_text)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
