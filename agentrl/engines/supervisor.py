"""The small process that stands between agentrl and a server, and outlives neither.

    python supervisor.py PARENT_PID -- COMMAND ...

It runs the command in a process group of its own and ends everything that came of it when the
command ends, when it is told to (SIGTERM, SIGINT, SIGHUP), or when its parent is gone, however the
parent died: a killed process can clean up nothing itself. Processes that the server starts and
that leave its group are found too, because orphans below this process become its children.

It also ends everything when a process is gone without which the server answers nothing: engines of
several processes notice that late (vLLM, 8 s) or never (SGLang, whose others live on).

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
VITAL = (b"VLLM::", b"sglang::scheduler", b"sglang::detokenizer")
"""How the titles begin of processes that a server cannot do without. SGLang's others, which read
requests, are replaced by itself."""
SEARCH_POLLS = 10
"""Between two searches for such processes; those that are known are looked at in each poll."""
LAST_WORDS_SECONDS = 1.0
"""How long a server that lost one may take to end by itself and say why."""


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _stat(pid: int) -> tuple[str, int, str] | None:
    """State, parent and time of birth of a process; None if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[1]), fields[19]


def _descendants(pid: int) -> list[int]:
    """All living processes below `pid`, zombies left out."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        if (stat := _stat(int(entry.name))) is not None and stat[0] != "Z":
            children.setdefault(stat[1], []).append(int(entry.name))
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


class _Vital:
    """The processes below this one that the server cannot do without."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[str, str]] = {}
        """Time of birth and title by process id."""
        self._polls = 0

    def lost(self) -> str | None:
        """The title of one that was there and is no longer."""
        for pid, (born, title) in self._known.items():
            stat = _stat(pid)
            if stat is None or stat[0] == "Z" or stat[2] != born:
                return title
        if self._polls % SEARCH_POLLS == 0:
            self._search()
        self._polls += 1
        return None

    def _search(self) -> None:
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(OSError):
                title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0]
                if title.startswith(VITAL) and (stat := _stat(pid)) is not None:
                    self._known[pid] = stat[2], title.decode(errors="replace")


def _end_everything(child: subprocess.Popen[bytes], grace: float) -> None:
    """SIGTERM the server's group, wait for the server, then SIGKILL whatever is left below us."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(grace)
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
    vital, lost = _Vital(), None
    while status is None and os.getppid() == parent:
        received = signal.sigtimedwait(watched, POLL_SECONDS)
        if received is not None and received.si_signo in STOP_SIGNALS:
            break
        status = child.poll()
        if status is None and (lost := vital.lost()) is not None:
            print(f"{lost} has ended, and the server is ended with it", flush=True)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(LAST_WORDS_SECONDS)
            break
    _end_everything(child, GRACE_SECONDS if lost is None else 0)
    if status is None:
        status = child.poll()
    return 1 if status is None else status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
