"""A text stream that cannot fail: what nobody can read is dropped."""

from __future__ import annotations

import os
from typing import TextIO, cast

__all__ = ["unbreakable"]


def unbreakable(stream: TextIO | None) -> TextIO:
    """Wrap `stream` for writing; None (a process without stdout) drops everything."""
    return cast(TextIO, _Unbreakable(_nowhere() if stream is None else stream))


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


class _Unbreakable:
    """The part of a text stream that rich writes to."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @property
    def encoding(self) -> str:
        return self._stream.encoding or "utf-8"

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            return self._stream.write(text.encode("ascii", "replace").decode("ascii"))
        except (OSError, ValueError):
            self._stream = _nowhere()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            # A pipe keeps what it could not pass on and would raise again at every write.
            self._stream = _nowhere()

    def isatty(self) -> bool:
        return not self._stream.closed and self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()
