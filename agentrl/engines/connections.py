"""Many HTTP connections to one host, without a pool that grows slower with each.

httpcore's pool looks at every connection when a request begins and again when it ends: with 256 in
use that is most of the time of a short request. Here each connection has a pool of its own, and
those that are idle lie on a stack.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import httpx

__all__ = ["REUSED", "SENT", "ManyConnections"]

SENT = "agentrl.sent"
"""An extension of a request: what is called when all of it is written."""
REUSED = "agentrl.reused"
"""An extension that a request gets: whether it went over a connection that was idle before."""


class ManyConnections(httpx.AsyncBaseTransport):
    """Opens a connection wherever none is idle; there is no limit to their number.

    Args:
        keepalive: Seconds after which an idle connection is not used again.
    """

    def __init__(self, *, keepalive: float) -> None:
        self._limits = httpx.Limits(
            max_connections=1, max_keepalive_connections=1, keepalive_expiry=keepalive
        )
        self._context = httpx.create_ssl_context(trust_env=False)
        self._all: set[httpx.AsyncHTTPTransport] = set()
        self._idle: list[httpx.AsyncHTTPTransport] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request over the connection that was used last, or a new one."""
        request.extensions[REUSED] = bool(self._idle)
        connection = self._idle.pop() if self._idle else self._open()
        if (sent := request.extensions.get(SENT)) is not None:
            request.stream = _Outgoing(request.content, sent)
        try:
            response = await connection.handle_async_request(request)
        except BaseException:
            await self._drop(connection)
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Body(
            response.stream,
            read=lambda: self._idle.append(connection),
            unread=lambda: self._drop(connection),
        )
        return response

    async def aclose(self) -> None:
        """Close every connection."""
        for connection in tuple(self._all):
            await connection.aclose()

    def _open(self) -> httpx.AsyncHTTPTransport:
        connection = httpx.AsyncHTTPTransport(
            verify=self._context, limits=self._limits, trust_env=False
        )
        self._all.add(connection)
        return connection

    async def _drop(self, connection: httpx.AsyncHTTPTransport) -> None:
        """Close a connection in which a request broke off: its state is unknown."""
        self._all.discard(connection)
        await connection.aclose()


class _Outgoing(httpx.AsyncByteStream):
    """The body of a request, in one part; asked for another, it says that this one is written."""

    def __init__(self, body: bytes, sent: Callable[[], None]) -> None:
        self._body: bytes | None = body
        self._sent = sent

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._body is None:
            self._sent()
            raise StopAsyncIteration
        body, self._body = self._body, None
        return body


class _Body(httpx.AsyncByteStream):
    """The body of an answer; at its end it says whether all of it was read."""

    def __init__(
        self,
        body: httpx.AsyncByteStream,
        *,
        read: Callable[[], None],
        unread: Callable[[], Awaitable[None]],
    ) -> None:
        self._body, self._read, self._unread = body, read, unread
        self._complete = False
        self._closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._body:
            yield part
        self._complete = True

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            await self._body.aclose()
        except BaseException:
            self._complete = False
            raise
        finally:
            if self._complete:
                self._read()
            else:
                await self._unread()
