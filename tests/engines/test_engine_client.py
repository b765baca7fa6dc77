"""What a client of one server sends, and what it makes of answers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from agentrl.engines.http import EngineClient, NoAnswerError, RequestRefusedError

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

BODY = gzip.compress(b'{"version": 3}')
GZIP = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\n"
WHOLE = GZIP + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
SPOILT = GZIP + b"Content-Length: 5\r\n\r\nno zi"
BROKEN = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\nConnection: close\r\n\r\n{"
MOVED = b"HTTP/1.1 307 Moved\r\nLocation: https://elsewhere/pause\r\nContent-Length: 0\r\n\r\n"


@asynccontextmanager
async def listening(serve: Serve) -> AsyncIterator[str]:
    """Host and port of a server that has this done with every connection."""
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()[:2]
        yield f"{host}:{port}"


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[tuple[str, list[str]]]:
    """Host and port of a server that answers every request so, and the heads of the requests."""
    heads: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with listening(serve) as place:
        yield place, heads


@pytest.mark.parametrize("end", ["", "/"])
async def test_paths_and_parameters_follow_the_prefix_of_an_address(end: str) -> None:
    async with answering(WHOLE) as (place, heads):
        client = EngineClient(f"http://{place}/first{end}", limit=5)
        answer = await client.post("/pause", {}, params={"mode": "keep"})
        assert answer == {"version": 3}
        assert heads[0].startswith("POST /first/pause?mode=keep HTTP/1.1\r\n")
        await client.close()


async def test_a_name_and_a_password_in_the_address_are_sent() -> None:
    async with answering(WHOLE) as (place, heads):
        client = EngineClient(f"http://ann:p%40ss@{place}", limit=5, api_key="key")
        await client.post("/pause")
        expected = base64.b64encode(b"ann:p@ss").decode()
        assert f"Authorization: Basic {expected}\r\n" in heads[0]
        await client.close()


async def test_a_redirect_is_a_refusal() -> None:
    """A server that was not told to pause would sample on while its weights change."""
    async with answering(MOVED) as (place, _):
        client = EngineClient(f"http://{place}", limit=5)
        with pytest.raises(RequestRefusedError, match="/pause answered 307"):
            await client.post("/pause")
        await client.close()


@pytest.mark.parametrize("answer", [BROKEN, SPOILT])
async def test_an_answer_that_cannot_be_read_to_its_end_is_none(answer: bytes) -> None:
    async with answering(answer) as (place, _):
        client = EngineClient(f"http://{place}", limit=5)
        with pytest.raises(NoAnswerError, match="is gone"):
            await client.post("/generate", {})
        await client.close()


@asynccontextmanager
async def breaking(seconds: float) -> AsyncIterator[tuple[str, list[int]]]:
    """A server that answers `/first` and breaks every other request off after some seconds.

    Yields its address and the connection of each request.
    """
    requests: list[int] = []
    connections = itertools.count()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = next(connections)
        with contextlib.suppress(asyncio.IncompleteReadError):  # the client has closed it
            while head := await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(2)  # the body, {}
                requests.append(number)
                if b" /first " not in head and len(requests) < 4:
                    await asyncio.sleep(seconds)
                    break
                writer.write(WHOLE)
                await writer.drain()
        writer.close()

    async with listening(serve) as place:
        yield f"http://{place}", requests


async def test_a_request_that_meets_the_end_of_an_idle_connection_is_sent_again() -> None:
    async with breaking(0) as (url, requests):
        client = EngineClient(url, limit=5)
        await asyncio.gather(*(client.post("/first", {}, repeatable=True) for _ in range(2)))
        await client.post("/generate", {}, repeatable=True)
        assert requests[2] in (0, 1)
        assert len(requests) == 4
        await client.close()


@pytest.mark.parametrize(("warm", "seconds"), [(True, 1.2), (False, 0)])
async def test_a_request_that_a_server_may_be_at_is_not_sent_again(
    warm: bool, seconds: float
) -> None:
    """The process that reads requests died, the one that samples has the request still."""
    async with breaking(seconds) as (url, requests):
        client = EngineClient(url, limit=5)
        if warm:
            await client.post("/first", {}, repeatable=True)
        with pytest.raises(NoAnswerError, match="is gone"):
            await client.post("/generate", {}, repeatable=True)
        assert len(requests) == 1 + warm
        await client.close()
