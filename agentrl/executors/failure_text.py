"""What a user is shown of a failed episode: the frames of their own code, and what was raised.

`Trajectory.error` keeps the whole traceback. Most of its lines are agentrl's, which drove the
agent, or those of libraries below agentrl; neither says what to correct.
"""

from __future__ import annotations

import os
import re
import sysconfig
from pathlib import Path

__all__ = ["shorten"]

_HEADER = "Traceback (most recent call last):"
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line \d+')
_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_LIBRARIES = tuple(
    f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib")
)


def shorten(error: str) -> str:
    """The user's part of a traceback as Python prints it; any other text as it is.

    Of each exception of a chain are left: the frames from the first of the user's on, without
    agentrl's, and the exception itself. An exception that no code of the user's took part in is
    left out, unless it is the last one, which failed the episode.
    """
    before, *tracebacks = re.split(rf"^{re.escape(_HEADER)}\n", error, flags=re.MULTILINE)
    if not tracebacks:
        return error
    shown = [before.rstrip()]
    for number, text in enumerate(tracebacks):
        is_last = number == len(tracebacks) - 1
        frames, raised = _split(text)
        own = _users(frames)
        if own or is_last:
            shown.append("\n".join([*own, raised if is_last else raised.rstrip() + "\n"]))
    return "\n".join(part for part in shown if part).rstrip()


def _split(text: str) -> tuple[list[str], str]:
    """The frames of one traceback, each with its lines of code, and what follows them."""
    frames: list[str] = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if _FRAME.match(line):
            frames.append(line)
        elif frames and line.startswith("  "):
            frames[-1] += "\n" + line
        else:
            return frames, "\n".join(lines[number:])
    return frames, ""


def _users(frames: list[str]) -> list[str]:
    """The frames from the first of the user's own files on, without agentrl's."""
    shown: list[str] = []
    for frame in frames:
        match = _FRAME.match(frame)
        file = match["file"] if match else ""
        is_own = not file.startswith((*_LIBRARIES, "<frozen"))
        if not file.startswith(_OURS) and (shown or is_own):
            shown.append(frame)
    return shown
