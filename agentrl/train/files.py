"""Files that are whole or absent: written aside, flushed to disk, then renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agentrl.errors import SaveError

__all__ = ["replace_text", "replacing"]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a scratch path beside `path`; when the block succeeds it becomes `path`.

    A reader sees the old file or the new one, never a part, and a failed block leaves the old one.

    Raises:
        SaveError: the file could not be written; `path` is as it was.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield scratch
        _flush_to_disk(scratch)
        scratch.replace(path)
    except OSError as error:
        raise _save_error(path, error) from error
    finally:
        with suppress(OSError):
            scratch.unlink()


def replace_text(path: Path, text: str) -> None:
    """Write `text` as the whole of `path`, in UTF-8; raises `SaveError` as `replacing` does."""
    with replacing(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def _save_error(path: Path, error: OSError) -> SaveError:
    reason = error.strerror or str(error)
    return SaveError(
        f"could not write {path}: {reason}; what was saved before is untouched: make room or give "
        "access, then go on with --resume"
    )


def _flush_to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
