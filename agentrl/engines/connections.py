"""Many HTTP connections to one host, without a pool that grows slower with each.

httpcore's pool looks at every connection when a request begins and again when it ends: with 256 in
use that is most of the time of a short request. Here each connection has a pool of its own, and
those that are idle lie on a stack.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx

__all__ = ["ManyConnections"]


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
        self._all: list[httpx.AsyncHTTPTransport] = []
        self._idle: list[httpx.AsyncHTTPTransport] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request over the connection that was used last, or a new one."""
        connection = self._idle.pop() if self._idle else self._open()
        try:
            response = await connection.handle_async_request(request)
        except BaseException:
            self._idle.append(connection)
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Borrowed(response.stream, connection, self._idle)
        return response

    async def aclose(self) -> None:
        """Close every connection."""
        for connection in self._all:
            await connection.aclose()

    def _open(self) -> httpx.AsyncHTTPTransport:
        connection = httpx.AsyncHTTPTransport(
            verify=self._context, limits=self._limits, trust_env=False
        )
        self._all.append(connection)
        return connection


class _Borrowed(httpx.AsyncByteStream):
    """The body of an answer; when it is closed, its connection is idle again."""

    def __init__(
        self,
        body: httpx.AsyncByteStream,
        connection: httpx.AsyncHTTPTransport,
        idle: list[httpx.AsyncHTTPTransport],
    ) -> None:
        self._body, self._connection, self._idle = body, connection, idle
        self._open = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._body:
            yield part

    async def aclose(self) -> None:
        try:
            await self._body.aclose()
        finally:
            if self._open:
                self._open = False
                self._idle.append(self._connection)
