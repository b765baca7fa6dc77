"""A process that is nothing without the one that started it."""

from __future__ import annotations

import ctypes
import signal
import sys

__all__ = ["die_with_parent"]

PR_SET_PDEATHSIG = 1
"""prctl(2) option of Linux."""


def die_with_parent() -> None:
    """Have this process killed when its parent dies, however that happens (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
