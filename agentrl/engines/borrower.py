"""An engine in a process that has none: each request is admitted by the process that has them.

See `lender` for what is said. A request is sent by this process, and its answer read here, as the
route of the kind of server says.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.engines.base import Engine, WeightSource
from agentrl.engines.http import EngineClient
from agentrl.engines.lender import Answered, Ask, Broke, GaveUp, Granted, Refused, Sent
from agentrl.engines.token_route import Permit, TokenRoute
from agentrl.errors import EngineError
from agentrl.types import Generation, SamplingParams

__all__ = ["BorrowedEngine"]


@dataclass(eq=False, slots=True)
class _Loan:
    """One request: the permit that is waited for, the exchange with the server, and a refusal."""

    permit: asyncio.Future[Permit]
    refused: asyncio.Future[EngineError]
    exchange: asyncio.Future[Generation] | None = None


class BorrowedEngine(Engine):
    """The engines of another process as one.

    Args:
        route: how their servers are asked for tokens.
        send: takes a message to the lender.
        version: of the weights now.
        api_key: sent with every request.
    """

    def __init__(
        self,
        route: TokenRoute,
        send: Callable[[Ask | Sent | Answered | Broke | GaveUp], None],
        *,
        version: int = 0,
        api_key: str | None = None,
    ) -> None:
        self._route, self._send, self._api_key = route, send, api_key
        self._version = version
        self._numbers = itertools.count()
        self._loans: dict[int, _Loan] = {}
        self._clients: dict[str, EngineClient] = {}

    @property
    def weight_version(self) -> int:
        """The policy version that the next token is sampled from, as far as was heard."""
        return self._version

    @property
    def max_model_len(self) -> int:
        """The most tokens, prompt and response together, that one request may hold."""
        return self._route.limits.max_model_len

    @property
    def repeats(self) -> bool:
        """False: the numerics of a server depend on what it samples at the same time."""
        return False

    def note_version(self, version: int) -> None:
        """The engines sample from these weights now."""
        self._version = version

    def take(self, message: Granted | Refused) -> None:
        """Hear what the lender says."""
        loan = self._loans.get(message.loan)
        if loan is None:  # nobody waits any more
            return
        if isinstance(message, Granted):
            self._version = max(self._version, message.permit.version)
            if not loan.permit.done():
                loan.permit.set_result(message.permit)
            return
        loan.refused.set_result(message.error)
        loan.permit.cancel()
        if loan.exchange is not None:
            loan.exchange.cancel()

    async def generate(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        rollout_id: str = "",
        group_id: str = "",
    ) -> Generation:
        """Sample a continuation; see `Engine.generate`."""
        self._route.check(token_ids, params)
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        loan = self._loans[number] = _Loan(loop.create_future(), loop.create_future())
        self._send(Ask(number, len(token_ids), params.max_new_tokens, rollout_id, group_id))
        try:
            while True:
                permit = await loan.permit
                loan.permit = loop.create_future()  # of a request that may follow this one
                exchange = self._exchange(number, token_ids, params, permit)
                loan.exchange = asyncio.ensure_future(exchange)
                generation = await loan.exchange
                if not permit.computes_only:
                    break
                self._send(_answered(number, generation))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if loan.refused.done() and not (task is not None and task.cancelling()):
                raise loan.refused.result() from None
            self._send(GaveUp(number))
            raise
        except EngineError as error:
            self._send(Broke(number, error))
            raise await loan.refused from error
        except BaseException:  # a fault of agentrl's own: nobody waits for the request any more
            self._send(GaveUp(number))
            raise
        finally:
            if loan.exchange is not None:
                loan.exchange.cancel()
            del self._loans[number]
        self._send(_answered(number, generation))
        return generation

    async def update_weights(self, source: WeightSource) -> None:
        """Refuse: the weights are the lender's affair."""
        raise EngineError("a borrowed engine takes no weights: update the lender's")

    async def close(self) -> None:
        """Close the connections to the servers."""
        for client in self._clients.values():
            await client.close()

    async def _exchange(
        self, number: int, token_ids: Sequence[int], params: SamplingParams, permit: Permit
    ) -> Generation:
        client = self._clients.get(permit.url)
        if client is None:
            limit = self._route.limits.request_timeout
            client = EngineClient(permit.url, limit=limit, api_key=self._api_key)
            self._clients[permit.url] = client
        return await self._route.sample(
            client, token_ids, params, permit, lambda: self._send(Sent(number))
        )


def _answered(number: int, generation: Generation) -> Answered:
    return Answered(
        number, generation.num_sampled, generation.cached_tokens, generation.finish_reason
    )
