"""One server's HTTP connection: kept alive, wide enough, and with errors that say what to do.

Requests are sent again only where that is safe: the connection was never made, or the server closed
an idle one just as a request that changes nothing was written to it.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import httpx

from agentrl.engines.connections import REUSED, SENT, ManyConnections
from agentrl.errors import EngineError

__all__ = ["EngineClient", "NoAnswerError", "RequestRefusedError"]

KEEPALIVE_SECONDS = 2.0
"""Both servers run uvicorn, which closes a connection that was idle for 5 s."""
ATTEMPTS = 3
RETRY_PAUSE = 0.2
CLOSING_SECONDS = 1.0
"""A connection that breaks later than this after a request began was not closed before it came."""
CONNECT_SECONDS = 10.0
_CLOSED = (httpx.RemoteProtocolError, httpx.ReadError)
"""How a connection ends that the other side closes."""


class RequestRefusedError(EngineError):
    """The server answered with an error status: it lives, and refuses this request."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message, status)  # both, so that it can be pickled
        self.status = status

    def __str__(self) -> str:
        return str(self.args[0])


class NoAnswerError(EngineError):
    """The server did not answer: it was too `late`, or the connection broke."""

    def __init__(self, message: str, *, late: bool) -> None:
        super().__init__(message)
        self.late = late

    def __reduce__(self) -> tuple[Callable[..., NoAnswerError], tuple[object, ...]]:
        return partial(NoAnswerError, late=self.late), self.args


class EngineClient:
    """JSON over HTTP to one server.

    Args:
        url: Base address; a name and a password in it are sent, too, instead of `api_key`.
        limit: Seconds that one request may take, unless it names its own.
        api_key: Sent as a bearer token.
    """

    def __init__(self, url: str, *, limit: float, api_key: str | None = None) -> None:
        self.url = url
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        if (address := httpx.URL(url)).userinfo:
            pair = f"{address.username}:{address.password}".encode()
            headers = {"Authorization": f"Basic {base64.b64encode(pair).decode()}"}
        self._limit = limit
        self._urls: dict[str, httpx.URL] = {}
        """Of each path: httpx takes a fifth of a short request's time to parse it."""
        self._headers = {"Content-Type": "application/json", **headers}
        # A client of httpx around it would look for cookies, redirects and proxies.
        self._connections = ManyConnections(keepalive=KEEPALIVE_SECONDS)

    async def get(self, path: str, *, limit: float | None = None) -> httpx.Response:
        """GET `path`; raises EngineError as `post` does."""
        return await self._request("GET", path, None, None, None, limit, None, repeatable=True)

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        limit: float | None = None,
        repeatable: bool = False,
        sent: Callable[[], None] | None = None,
    ) -> Any:
        """POST JSON and return the answer: parsed JSON, or None where it is none.

        `repeatable` says that the request may reach the server twice without harm. `sent` is called
        each time that all of it is written.

        Raises:
            RequestRefusedError: the server answered with an error status, or a redirect.
            NoAnswerError: it did not answer: dead, unreachable, or too slow.
        """
        content = None if body is None else json.dumps(body).encode()
        response = await self._request(
            "POST", path, content, params, headers, limit, sent, repeatable=repeatable
        )
        kind = response.headers.get("content-type", "")
        return response.json() if kind.startswith("application/json") else None

    async def close(self) -> None:
        """Close every connection. Requests in flight fail."""
        await self._connections.aclose()

    async def _request(
        self,
        method: str,
        path: str,
        content: bytes | None,
        params: Mapping[str, Any] | None,
        headers: Mapping[str, str] | None,
        limit: float | None,
        sent: Callable[[], None] | None,
        *,
        repeatable: bool,
    ) -> httpx.Response:
        limit = limit or self._limit
        if path not in self._urls:
            self._urls[path] = httpx.URL(self.url.rstrip("/") + path)
        sent_headers = {**self._headers, **(headers or {})}
        if not repeatable:
            # Servers drop the connection after an error of theirs, at a moment that a next request
            # may just meet; these are few, so each has a connection of its own.
            sent_headers["Connection"] = "close"
        timeout = httpx.Timeout(limit, connect=CONNECT_SECONDS, pool=None)
        request = httpx.Request(
            method,
            self._urls[path],
            content=content,
            params=params and dict(params),
            headers=sent_headers,
            extensions={"timeout": timeout.as_dict(), SENT: sent},
        )
        for attempt in range(1, ATTEMPTS + 1):
            began = time.monotonic()
            try:
                async with asyncio.timeout(limit):
                    response = await self._exchange(request)
            except (TimeoutError, httpx.TimeoutException) as error:
                raise NoAnswerError(
                    f"{self.url}{path} did not answer within {limit:g} s: raise "
                    "engine.request_timeout, or engine.update_timeout for a weight update",
                    late=True,
                ) from error
            except (httpx.TransportError, httpx.DecodingError) as error:
                # A kept connection that the server has just closed ends before any answer. Other
                # ends are a death: the request may live on there, where its double would meet it.
                soon = time.monotonic() - began < CLOSING_SECONDS
                was_closed = isinstance(error, _CLOSED) and request.extensions[REUSED] and soon
                unheard = isinstance(error, httpx.ConnectError) or (repeatable and was_closed)
                if unheard and attempt < ATTEMPTS:
                    await asyncio.sleep(RETRY_PAUSE * attempt)
                    continue
                raise NoAnswerError(
                    f"{self.url}{path} is gone ({type(error).__name__}: {error})", late=False
                ) from error
            if not response.is_success:  # a redirect neither: what was asked for is not done
                raise RequestRefusedError(
                    f"{self.url}{path} answered {response.status_code}: {response.text[:2000]}",
                    response.status_code,
                )
            return response
        raise AssertionError("every attempt returns or raises")

    async def _exchange(self, request: httpx.Request) -> httpx.Response:
        """Send a request, which may have been sent before, and read the whole answer."""
        response = await self._connections.handle_async_request(request)
        try:
            await response.aread()
        finally:
            await response.aclose()
        return response
