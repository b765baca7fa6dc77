"""A server process: started, waited for, watched, restarted, and ended whatever happens.

The process runs under `supervisor.py` in a session of its own, so that Ctrl-C reaches agentrl alone
and nothing of the server survives agentrl, even when that is killed. What the server prints goes to
a log file, whose last lines are part of every error about it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx

from agentrl.engines import supervisor
from agentrl.errors import EngineError

__all__ = ["EngineServer", "free_port", "last_lines"]

logger = logging.getLogger(__name__)

PORTS = range(16384, 32768)
"""Below those that Linux gives to connections (32768 and up by default): one of them could
have taken the port by the time that a server, which first loads its model, listens on it."""
HEALTH_INTERVAL = 0.25
RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "LOCAL_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
"""What makes a process a rank of the learner. A server's own processes would take it for theirs,
and under `TORCHELASTIC_USE_AGENT_STORE` each would wait for another to open their store."""
_EXCEPTION = re.compile(r"\b\w+(Error|Exception): .*")
STOP_SECONDS = supervisor.GRACE_SECONDS + 5.0


def free_port(host: str = "127.0.0.1") -> int:
    """A port of `host` that nothing has at this moment, drawn anew in each process.

    Raises:
        EngineError: there is none, or `host` is no address of this machine.
    """
    failure: OSError | None = None
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                failure = error
            else:
                return port
    raise EngineError(f"no port of {host} could be taken ({failure}): see engine.host")


def last_lines(path: Path, count: int = 20) -> str:
    """The last `count` lines of a log file that are not empty."""
    if not path.exists():
        return ""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - 65536))
        text = file.read().decode(errors="replace")
    return "\n".join([line for line in text.splitlines() if line.strip()][-count:])


def first_error(path: Path, start: int = 0) -> str:
    """The first exception in a log file from byte `start` on: what the others come from."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            text = line.decode(errors="replace")
            harmless = "WARNING" in text or "disabled:" in text
            if not harmless and (found := _EXCEPTION.search(text)):
                return found.group().strip()
    return ""


def _plain_environment() -> dict[str, str]:
    """This process's environment, as it would be if no torchrun had started it."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in RANK_VARIABLES and not name.startswith("TORCHELASTIC_")
    }


class EngineServer:
    """One server process and its address.

    `command(port)` gives the command line, so that every start may take a fresh port.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        *,
        name: str,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
        health_path: str = "/health",
        start_timeout: float = 600.0,
    ) -> None:
        self.name = name
        self.log_path = log_path
        self.url = ""
        self._command = command
        self._env = dict(env or {})
        self._host = host
        self._health_path = health_path
        self._start_timeout = start_timeout
        self._process: asyncio.subprocess.Process | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._stopping = False
        self._answered = False
        self._log_start = 0
        self.died = asyncio.Event()
        """Set when the process ended without being asked to, or did not start; each start makes
        another one."""
        self.last_death = ""
        """What was said of it when `died` was set the last time."""

    @property
    def pid(self) -> int | None:
        """Process id of the supervisor, whose descendants are the server."""
        return self._process.pid if self._process is not None else None

    @property
    def alive(self) -> bool:
        """True from a start until the process ended."""
        return self._process is not None and self._process.returncode is None

    def describe_death(self) -> str:
        """Say how the server ended, with its own last lines."""
        code = self._process.returncode if self._process is not None else None
        lines = last_lines(self.log_path)
        error = first_error(self.log_path, self._log_start)
        return (
            f"the {self.name} server ended with status {code}"
            + (f", after {error}" if error else "")
            + f"; its log is {self.log_path}"
            + (f" and ends with:\n{lines}" if lines else "")
        )

    async def start(self) -> None:
        """Start the process and wait until it answers its health check.

        Raises:
            EngineError: it ended, or did not answer in time; its last lines are in the message.
        """
        port = free_port(self._host)
        self.url = f"http://{self._host}:{port}"
        command = [str(part) for part in self._command(port)]
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.died = asyncio.Event()
        self._stopping = self._answered = False
        logger.info("starting %s at %s: %s", self.name, self.url, " ".join(command))
        wrapped = [sys.executable, supervisor.__file__, str(os.getpid()), "--", *command]
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = await asyncio.create_subprocess_exec(
                *wrapped,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env={**_plain_environment(), **self._env},
                start_new_session=True,
            )
        self._watcher = asyncio.create_task(self._watch(self._process))
        try:
            await self._wait_for_health()
        except BaseException as error:
            await self.stop()
            self.last_death = str(error)
            self.died.set()
            raise

    async def stop(self) -> None:
        """End the server and everything it started. Safe to call twice."""
        self._stopping = True
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), STOP_SECONDS)
            except TimeoutError:
                process.kill()
                await process.wait()
        if self._watcher is not None:
            await self._watcher

    async def restart(self) -> None:
        """End what is left of the server and start it anew, at a new address."""
        await self.stop()
        await self.start()

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        if not self._stopping:
            self.last_death = self.describe_death()
            if self._answered:  # else `start` raises it
                logger.error("%s", self.last_death)
            self.died.set()

    async def _wait_for_health(self) -> None:
        started = time.monotonic()
        async with httpx.AsyncClient(base_url=self.url, timeout=10.0, trust_env=False) as client:
            while True:
                if self.died.is_set():
                    raise EngineError(self.describe_death())
                try:
                    if (await client.get(self._health_path)).status_code == httpx.codes.OK:
                        self._answered = True
                        return
                except httpx.TransportError:
                    pass  # not listening yet
                if time.monotonic() - started > self._start_timeout:
                    raise EngineError(
                        f"the {self.name} server did not answer within {self._start_timeout:g} s: "
                        f"raise engine.start_timeout, or see {self.log_path}, which ends with:\n"
                        f"{last_lines(self.log_path)}"
                    )
                await asyncio.sleep(HEALTH_INTERVAL)
