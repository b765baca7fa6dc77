"""Checkpoints on disk: written aside, then renamed, so that there is never half of one.

A checkpoint is a folder `step-<number>` with whatever its writers put there. While it is written it
has another name; it counts from the moment it is renamed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agentrl.errors import SaveError

__all__ = ["checkpoint_path", "checkpoint_step", "latest_checkpoint", "prune", "write_atomically"]

_FINISHED = re.compile(r"step-(\d+)")
_UNFINISHED = ".unfinished-"
_REPLACED = ".replaced-"


def checkpoint_path(root: Path, step: int) -> Path:
    """Where the checkpoint after `step` training steps lies under `root`."""
    return root / f"step-{step:08d}"


def checkpoint_step(path: Path) -> int | None:
    """The number in the name of a finished checkpoint; None for anything else."""
    match = _FINISHED.fullmatch(path.name)
    return int(match.group(1)) if match else None


def latest_checkpoint(root: Path) -> Path | None:
    """The finished checkpoint with the highest step under `root`, if there is any."""
    finished = _finished(root)
    return finished[-1] if finished else None


@contextmanager
def write_atomically(target: Path) -> Iterator[Path]:
    """Give an empty folder to write into; it takes the name `target` when the block ends well.

    A folder that is there already stays until the new one is complete. When the block fails,
    what it wrote is removed and what was there before is untouched.

    Raises:
        SaveError: the disk is full or the folder cannot be written.
    """
    aside = target.with_name(f"{_UNFINISHED}{target.name}")
    replaced = target.with_name(f"{_REPLACED}{target.name}")
    try:
        _restore(target, aside, replaced)  # what a writer that was killed left behind
        shutil.rmtree(replaced, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        _flush(aside)
        if target.exists():
            target.rename(replaced)
        aside.rename(target)
        _flush_folder(target.parent)
    except OSError as error:
        _restore(target, aside, replaced)
        raise SaveError(
            f"{target} could not be written ({error.strerror or error}): free some space or check "
            f"the permissions, then go on with --resume. {_what_is_kept(target)}"
        ) from error
    except SaveError as error:
        _restore(target, aside, replaced)
        raise SaveError(f"{error} {_what_is_kept(target)}") from error
    except BaseException:
        _restore(target, aside, replaced)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


def prune(root: Path, keep: int) -> None:
    """Remove all but the newest `keep` (at least 1) checkpoints, and unfinished ones."""
    for path in [*_finished(root)[:-keep], *root.glob(f"{_UNFINISHED}*")]:
        shutil.rmtree(path)


def _finished(root: Path) -> list[Path]:
    numbered = [(checkpoint_step(path), path) for path in root.glob("step-*") if path.is_dir()]
    return [path for _, path in sorted((n, path) for n, path in numbered if n is not None)]


def _restore(target: Path, aside: Path, replaced: Path) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    if replaced.exists() and not target.exists():
        with suppress(OSError):
            replaced.rename(target)


def _what_is_kept(target: Path) -> str:
    if target.exists():
        return f"The earlier {target.name} is kept."
    latest = latest_checkpoint(target.parent)
    if latest is not None:
        return f"The checkpoint {latest.name} is kept."
    return "What was saved before is untouched."


def _flush(folder: Path) -> None:
    """Make the kernel write the files, so that a rename cannot survive without their contents."""
    for directory, _, names in os.walk(folder):
        for name in names:
            with open(os.path.join(directory, name), "rb") as file:
                os.fsync(file.fileno())
        _flush_folder(Path(directory))


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
