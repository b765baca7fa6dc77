"""Servers as processes: their failures are told, their deaths are seen, and nothing outlives us."""

from __future__ import annotations

import ast
import asyncio
import os
import signal
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from agentrl.engines.server import EngineServer, free_port, last_lines
from agentrl.errors import EngineError

HEALTHY = """
import http.server, subprocess, sys

# Like the real servers: a worker in a session of its own, which a signal to the group misses.
worker = "import time; time.sleep(600)"
subprocess.Popen([sys.executable, "-c", worker, "MARK"], start_new_session=True)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
WITH_CHILD = HEALTHY.replace("[sys.executable,", '["TITLE",').replace(
    "start_new_session", "executable=sys.executable, start_new_session"
)
FAILING = "import sys; print('loading the model'); sys.exit('out of memory on device 0')"
LOUD = """
import sys
print("(Server) WARNING: few files may be open, which can end in `OSError: Too many open files`")
print("Responses API disabled: it needs more (ModuleNotFoundError: No module named 'harmony')")
print("(Worker) ERROR: RuntimeError: no kernel for head_dim=16")
print("(Core) ERROR: EngineDeadError: see above")
sys.exit("x\\n" * 100)
"""
SILENT = "import time; print('still loading'); time.sleep(600)"


def server(
    tmp_path: Path, program: str, mark: str = "", *, start_timeout: float = 30.0
) -> EngineServer:
    text = program.replace("MARK", mark)
    return EngineServer(
        lambda port: [sys.executable, "-u", "-c", text, str(port), mark],
        name="test-0",
        log_path=tmp_path / "test-0.log",
        start_timeout=start_timeout,
    )


def processes(mark: str) -> list[psutil.Process]:
    """Living processes with `mark` as an argument."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        alive = process.info["status"] != psutil.STATUS_ZOMBIE
        if alive and mark in (process.info["cmdline"] or []):
            found.append(process)
    return found


async def none_left(mark: str) -> None:
    await asyncio.to_thread(psutil.wait_procs, processes(mark))


async def test_a_server_of_one_rank_does_not_take_itself_for_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
    for name in names:
        monkeypatch.setenv(name, "1")
    told = "import os; print(sorted(os.environ), flush=True)" + HEALTHY
    one = server(tmp_path, told, f"mark-rank-{os.getpid()}")
    await one.start()
    await one.stop()
    seen = ast.literal_eval(one.log_path.read_text().splitlines()[0])
    assert "PATH" in seen
    assert not set(names) & set(seen)


async def test_a_server_answers_at_its_url_until_it_is_stopped(tmp_path: Path) -> None:
    mark = f"mark-stop-{os.getpid()}"
    one = server(tmp_path, HEALTHY, mark)
    await one.start()
    async with httpx.AsyncClient() as client:
        assert (await client.get(one.url + "/health")).status_code == 200
    assert len(processes(mark)) >= 2
    await one.stop()
    await one.stop()
    assert processes(mark) == []
    assert not one.died.is_set()


async def test_a_server_that_ends_at_start_says_why_in_its_own_words_and_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(EngineError, match="out of memory on device 0"):
        await server(tmp_path, FAILING).start()
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_of_many_errors_the_first_is_told(tmp_path: Path) -> None:
    expected = r"status 1, after RuntimeError: no kernel for head_dim=16; its log"
    with pytest.raises(EngineError, match=expected):
        await server(tmp_path, LOUD).start()


async def test_a_server_that_never_answers_is_given_up_and_ended(tmp_path: Path) -> None:
    mark = f"mark-silent-{os.getpid()}"
    with pytest.raises(EngineError, match=r"engine\.start_timeout(.|\n)*still loading"):
        await server(tmp_path, SILENT, mark, start_timeout=1.0).start()
    assert processes(mark) == []


async def test_the_death_of_a_server_is_seen_and_it_can_be_started_again(tmp_path: Path) -> None:
    mark = f"mark-death-{os.getpid()}"
    one = server(tmp_path, HEALTHY, mark)
    await one.start()
    supervisor = psutil.Process(one.pid)
    supervisor.children()[0].kill()
    await asyncio.wait_for(one.died.wait(), 10)
    assert "test-0 server ended" in one.describe_death()
    assert processes(mark) == []
    await one.restart()
    assert one.alive
    assert not one.died.is_set()
    await one.stop()


async def kill_child(one: EngineServer, title: str) -> None:
    supervisor = psutil.Process(one.pid)
    (child,) = (p for p in supervisor.children(recursive=True) if p.cmdline()[0] == title)
    await asyncio.sleep(6)  # a search for new processes comes every 5 s
    child.kill()


async def test_a_server_is_dead_when_it_has_lost_its_engine(tmp_path: Path) -> None:
    """The other processes of an engine may live on, and never answer again."""
    mark = f"mark-engine-{os.getpid()}"
    one = server(tmp_path, WITH_CHILD.replace("TITLE", "VLLM::EngineCore"), mark)
    await one.start()
    await kill_child(one, "VLLM::EngineCore")
    await asyncio.wait_for(one.died.wait(), 10)
    assert "VLLM::EngineCore has ended" in one.describe_death()
    assert processes(mark) == []
    await one.stop()


async def test_a_server_lives_on_without_a_process_that_it_replaces_itself(tmp_path: Path) -> None:
    mark = f"mark-reader-{os.getpid()}"
    one = server(tmp_path, WITH_CHILD.replace("TITLE", "sglang::tokenizer_worker:1"), mark)
    await one.start()
    await kill_child(one, "sglang::tokenizer_worker:1")
    await asyncio.sleep(3)
    assert one.alive
    async with httpx.AsyncClient() as client:
        assert (await client.get(one.url + "/health")).status_code == 200
    await one.stop()


PARENT = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from engines.test_server import HEALTHY, server

async def main():
    one = server(Path({folder!r}), HEALTHY, {mark!r})
    await one.start()
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("killed_by", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
async def test_nothing_of_a_server_outlives_the_process_that_started_it(
    tmp_path: Path, killed_by: signal.Signals
) -> None:
    # AReaL#622, rllm PR#568
    mark = f"mark-orphan-{killed_by.name}-{os.getpid()}"
    tests = str(Path(__file__).parents[1])
    text = PARENT.format(tests=tests, folder=str(tmp_path), mark=mark)
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        text,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert parent.stdout is not None
    assert await parent.stdout.readline() == b"ready\n"
    assert len(processes(mark)) >= 2
    parent.send_signal(killed_by)
    await parent.wait()
    await asyncio.wait_for(none_left(mark), 20)


def test_the_last_lines_leave_out_empty_ones_and_need_no_file(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_lines(log) == ""
    log.write_text("first\n\nsecond\n\n\nthird\n")
    assert last_lines(log, 2) == "second\nthird"


def test_no_connection_takes_a_servers_port_before_the_server_does() -> None:
    """A server listens on it seconds later, and the learner has hundreds of connections."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if lowest < 32768:
        pytest.skip(f"connections of this machine take ports from {lowest} on")
    ports = {free_port() for _ in range(50)}
    assert max(ports) < lowest
    assert len(ports) > 1


def test_a_host_of_another_machine_has_no_port_here() -> None:
    with pytest.raises(EngineError, match=r"no port of 203\.0\.113\.7 .*: see engine\.host"):
        free_port("203.0.113.7")
