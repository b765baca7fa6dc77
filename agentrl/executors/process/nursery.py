"""The process that environments are forked from: it loads the agent's file once, and waits.

It is handed its end of a control socket (`SOCK_SEQPACKET`, a JSON object a message). The first is
the recipe of the instances; the answer is `{"ready": true}`, or `{"failed": why}`. Then:

    {"fork": n} with a socket     a process for an instance is forked; answered {"forked": n}
    {"kill": n}                   that process is ended
    {"ended": n, "status": s}     said when one has ended; s as from `os.waitpid`

It is single-threaded and has no event loop, so that forking is safe, and forking costs milliseconds
because what was imported is shared. Each process leads a process group, which ends with it. When
the socket closes, or agentrl dies, all of them end.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any

from agentrl.errors import AgentRLError
from agentrl.executors.base import AgentInstance
from agentrl.executors.process.child import serve
from agentrl.executors.process.frames import MESSAGE_BYTES
from agentrl.executors.process.parent import die_with_parent
from agentrl.executors.process.recipe import Recipe

__all__ = ["main"]


def main(descriptor: int) -> None:
    """Serve the control socket until it closes."""
    die_with_parent()
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    recipe = Recipe(**json.loads(control.recv(MESSAGE_BYTES)))
    try:
        instance_class = recipe.load()
    except AgentRLError as error:
        control.send(json.dumps({"failed": str(error)[: MESSAGE_BYTES // 2]}).encode())
        return
    # What is here now is never collected: the collector would write to pages that are shared.
    gc.freeze()
    control.send(json.dumps({"ready": True}).encode())
    _Nursery(control, instance_class).run()


class _Nursery:
    """Forks, kills and reaps the processes of environments."""

    def __init__(self, control: socket.socket, instance_class: type[AgentInstance]) -> None:
        self._control = control
        self._class = instance_class
        self._pids: dict[int, int] = {}
        """Numbers of living processes to their ids."""

    def run(self) -> None:
        """Until the control socket closes."""
        reading, writing = socket.socketpair()
        writing.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(reading, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if reading in ready:
                    reading.recv(4096)
                    self._reap()
                if self._control in ready and not self._obey():
                    break
        for pid in self._pids.values():
            _end_group(pid)
            os.waitpid(pid, 0)

    def _obey(self) -> bool:
        """Take one message; False when there are no more."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, 1)
        except ConnectionResetError:  # it was closed with something of ours unread
            return False
        if not message:
            return False
        order = json.loads(message)
        if "fork" in order:
            with socket.socket(fileno=descriptors[0]) as connection:
                self._fork(order["fork"], connection)
        elif order.get("kill") in self._pids:
            _end_group(self._pids[order["kill"]])
        return True

    def _fork(self, number: int, connection: socket.socket) -> None:
        pid = os.fork()
        if pid == 0:
            self._become_environment(connection)
        with suppress(OSError):  # it has ended already, or did this itself
            os.setpgid(pid, pid)
        self._pids[number] = pid
        self._say({"forked": number})

    def _become_environment(self, connection: socket.socket) -> None:
        """In the new process: never returns."""
        status = 1
        try:
            die_with_parent()
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            serve(connection, self._class)
            status = 0
        except OSError:
            pass  # agentrl has gone
        except BaseException:  # noqa: BLE001 - the edge of the process: nobody else would say it
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _reap(self) -> None:
        """Tell of the processes that have ended, and end what they started."""
        numbers = {pid: number for number, pid in self._pids.items()}
        while self._pids:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            number = numbers.get(ended.si_pid)
            if number is not None:
                # Before it is reaped: until then nobody else can have its id.
                _end_group(ended.si_pid)
            _, status = os.waitpid(ended.si_pid, 0)
            if number is not None:
                del self._pids[number]
                self._say({"ended": number, "status": status})

    def _say(self, message: dict[str, Any]) -> None:
        with suppress(OSError):  # nobody listens any more: the next read says so
            self._control.send(json.dumps(message).encode())


def _end_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
