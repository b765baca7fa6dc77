"""A process that is nothing without the one that started it."""

from __future__ import annotations

import ctypes
import signal
import socket
import subprocess
import sys

__all__ = ["die_with_parent", "start_child"]

PR_SET_PDEATHSIG = 1
"""prctl(2) option of Linux."""


def start_child(
    module: str, kind: socket.SocketKind = socket.SOCK_STREAM
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process that runs `main(descriptor)` of a module; returns it, and our end of the
    socket whose other end the descriptor is.

    It finds the modules that this process finds; `-m` would look into the working directory first,
    whose `types.py` would be taken for Python's own. It leads a session, so that Ctrl-C reaches
    this process alone, which says what is to end.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    call = f"from {module} import main; main({theirs.fileno()})"
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {call}"],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return process, ours


def die_with_parent() -> None:
    """Have this process killed when its parent dies, however that happens (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
