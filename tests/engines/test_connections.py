"""Connections to a server are made where none is idle, and used again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from agentrl.engines.connections import ManyConnections

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class CountingServer:
    """Answers every request when `release` is set; drops the connection of a request to /drop."""

    def __init__(self) -> None:
        self.url = ""
        self.connections = 0
        self.arrivals = asyncio.Semaphore(0)
        self.release = asyncio.Event()
        self.release.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET /drop"):
                    return
                self.arrivals.release()
                await self.release.wait()
                writer.write(ANSWER)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has closed
        finally:
            writer.close()


@asynccontextmanager
async def client(
    keepalive: float = 60.0,
) -> AsyncIterator[tuple[httpx.AsyncClient, CountingServer]]:
    counting = CountingServer()
    server = await asyncio.start_server(counting.serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    transport = ManyConnections(keepalive=keepalive)
    async with (
        server,
        httpx.AsyncClient(base_url=f"http://{host}:{port}", transport=transport) as http,
    ):
        yield http, counting


async def test_requests_at_once_have_a_connection_each_and_later_ones_use_them_again() -> None:
    async with client() as (http, server):
        server.release.clear()
        requests = [asyncio.create_task(http.get("/")) for _ in range(40)]
        for _ in range(40):
            await server.arrivals.acquire()
        server.release.set()
        assert {(await request).text for request in requests} == {"ok"}
        assert server.connections == 40
        await asyncio.gather(*(http.get("/") for _ in range(40)))
        assert server.connections == 40


async def test_the_connection_that_was_used_last_comes_first() -> None:
    async with client() as (http, server):
        for _ in range(5):
            await http.get("/")
        assert server.connections == 1


async def test_an_idle_connection_is_not_used_after_its_time() -> None:
    async with client(keepalive=0.05) as (http, server):
        await http.get("/")
        await asyncio.sleep(0.1)
        await http.get("/")
        assert server.connections == 2


async def test_a_request_that_fails_or_is_cancelled_does_not_spoil_the_next() -> None:
    async with client() as (http, server):
        with pytest.raises(httpx.RemoteProtocolError):
            await http.get("/drop")
        server.release.clear()
        request = asyncio.create_task(http.get("/"))
        await server.arrivals.acquire()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        server.release.set()
        assert (await http.get("/")).text == "ok"


@pytest.mark.parametrize("headers", [{}, {"Connection": "close"}])
async def test_a_request_that_is_cancelled_at_any_moment_leaves_a_working_client(
    headers: dict[str, str],
) -> None:
    async with client() as (http, _):
        moments = 0
        while True:
            await http.get("/", headers=headers)
            request = asyncio.create_task(http.get("/", headers=headers))
            for _ in range(moments):
                await asyncio.sleep(0)
            if request.done():
                break
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
            async with asyncio.timeout(5):
                assert (await http.get("/", headers=headers)).text == "ok"
            moments += 1
        assert moments > 5
