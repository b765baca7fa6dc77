"""The small process that stands between agentrl and a server, and outlives neither.

    python supervisor.py PARENT_PID -- COMMAND ...

It runs the command in a process group of its own and ends everything that came of it when the
command ends, when it is told to (SIGTERM, SIGINT, SIGHUP), or when its parent is gone, however the
parent died: a killed process can clean up nothing itself. Processes that the server starts and
that leave its group are found too, because orphans below this process become its children.
Only the standard library is used, and nothing of agentrl: any Python can run this file.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

__all__ = ["main"]

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
"""prctl(2) options of Linux."""

STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
GRACE_SECONDS = 10.0
"""How long a server may take to end after SIGTERM."""
LEFTOVER_SECONDS = 0.5
"""How long what it started may live on after it."""
POLL_SECONDS = 0.5


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _descendants(pid: int) -> list[int]:
    """All living processes below `pid`, zombies left out."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = entry.read_text().rpartition(")")
            state, parent = rest.split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(name.split(" ", 1)[0]))
    found: list[int] = []
    queue = [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass


def _end_everything(child: subprocess.Popen[bytes]) -> None:
    """SIGTERM the server's group, wait for the server, then SIGKILL whatever is left below us."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(GRACE_SECONDS)
    deadline = time.monotonic() + LEFTOVER_SECONDS
    while remaining := _descendants(os.getpid()):
        for pid in remaining if time.monotonic() > deadline else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap()
        time.sleep(0.02)


def main(arguments: list[str]) -> int:
    """Run the command until it ends or must end; returns the command's exit status."""
    parent = int(arguments[0])
    command = arguments[arguments.index("--") + 1 :]
    watched = STOP_SIGNALS | {signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    # The kernel sends this when the thread that started us ends, which may be earlier than the
    # process: the loop below asks whether the parent is still there before it believes it.
    _prctl(PR_SET_PDEATHSIG, signal.SIGCHLD)

    def in_child() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    child = subprocess.Popen(command, process_group=0, preexec_fn=in_child)
    status: int | None = None
    while status is None and os.getppid() == parent:
        received = signal.sigtimedwait(watched, POLL_SECONDS)
        if received is not None and received.si_signo in STOP_SIGNALS:
            break
        status = child.poll()
    _end_everything(child)
    if status is None:
        status = child.poll()
    return 1 if status is None else status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
