"""SGLang servers behind sglang-router, which chooses among them for each request.

Only requests for tokens go through the router. Pauses, weights, caches, versions, metrics and
aborts go to each server at its own address, since the router passes none of them on but a flush.
Which server has a request is the router's secret, so that an abort is told to all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from agentrl.engines.http import EngineClient, RequestRefusedError
from agentrl.engines.sglang import SGLangEngine
from agentrl.engines.sglang_tokens import RoutedSGLangTokens
from agentrl.errors import EngineError

__all__ = ["RoutedSGLangEngine", "behind_one_router"]

FLUSH_ATTEMPTS = 50
FLUSH_PAUSE = 0.1


class RoutedSGLangEngine(SGLangEngine):
    """One server behind a router: what it is asked for itself, and a share of the requests."""

    token_route = RoutedSGLangTokens

    def __init__(self, *, router_url: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._router_url = router_url
        self._router: EngineClient | None = None
        self.peers: Sequence[RoutedSGLangEngine] = (self,)
        """All servers behind the router."""

    async def start(self) -> None:
        """Connect to router and server, and sample a token."""
        self._router = self._make_client(self._router_url)
        await super().start()

    async def close(self) -> None:
        """End every request."""
        await super().close()
        if self._router is not None:
            await self._router.close()

    @property
    def _token_client(self) -> EngineClient:
        assert self._router is not None, "start() makes it"
        return self._router

    async def flush_cache(self) -> None:
        """Forget every cached prefix. Requests that stand in the way are ended with their tokens.

        Raises:
            EngineError: the server still holds some.
        """
        for _ in range(FLUSH_ATTEMPTS):
            try:
                await self._client.post("/flush_cache", repeatable=True)
            except RequestRefusedError:
                # Those that run here may have been sent by any of the peers, and one that the
                # router had not passed on may come after the first of these.
                await self._client.post("/abort_request", {"abort_all": True})
                await asyncio.sleep(FLUSH_PAUSE)
            else:
                self._siblings.forget()
                return
        raise EngineError(f"{self.label} did not drop its prefix cache: update again")

    async def _abort(self, request_id: str) -> None:
        aborts = (SGLangEngine._abort(peer, request_id) for peer in self.peers)
        for result in await asyncio.gather(*aborts, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result


def behind_one_router(engines: Sequence[RoutedSGLangEngine]) -> None:
    """Tell the servers behind one router of each other."""
    for engine in engines:
        engine.peers = tuple(engines)
        engine._cache_salt = engines[0]._cache_salt  # before their first update, too
