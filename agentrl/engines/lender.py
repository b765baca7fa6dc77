"""Lends the engines of this process to another one, request by request.

    borrower                        lender
    Ask                       ->    the pool chooses an engine, whose gate admits the request
                              <-    Granted, with what it must be sent with
    sends it; Sent            ->
    Answered, Broke, GaveUp   ->    it is counted, explained or aborted, like any other request
                              <-    Granted again, where its prompt alone was to be computed first
                              <-    Refused: it is not admitted, was ended, or why it broke

Requests and answers go between borrower and server alone. Everything that must be known in one
place stays here: which weights there are, who may send, who is in flight, what was counted. So an
update, a death or a pause is to a borrower's request what it is to this process's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from agentrl.engines.pool import EnginePool
from agentrl.engines.token_route import Permit
from agentrl.errors import EngineError
from agentrl.types import FinishReason

__all__ = ["Answered", "Ask", "Broke", "GaveUp", "Granted", "Lender", "Refused", "Sent"]


class Ask(NamedTuple):
    """The borrower wants to send a request, which it numbers."""

    loan: int
    prompt_tokens: int
    max_new_tokens: int
    rollout_id: str
    group_id: str


class Sent(NamedTuple):
    """The request is written to the server."""

    loan: int


class Answered(NamedTuple):
    """The request was answered; the loan is over, unless it only computed a prompt."""

    loan: int
    num_sampled: int
    cached_tokens: int
    finish_reason: FinishReason


class Broke(NamedTuple):
    """The request failed; a `Refused` will say why."""

    loan: int
    error: EngineError


class GaveUp(NamedTuple):
    """Nobody waits for the request any more, and the loan is over."""

    loan: int


class Granted(NamedTuple):
    """The request may be sent."""

    loan: int
    permit: Permit


class Refused(NamedTuple):
    """The request must not be sent, or its answer not be used; the loan is over."""

    loan: int
    error: EngineError


@dataclass(eq=False, slots=True)
class _Loan:
    """One request of the borrower: the task that has it admitted, and what is heard of it."""

    task: asyncio.Task[None]
    answer: asyncio.Future[Answered] | None = None
    note_sent: Callable[[], None] | None = None


class Lender:
    """One borrower's loans.

    Args:
        pool: whose engines are lent.
        send: takes a `Granted` or `Refused` to the borrower.
    """

    def __init__(self, pool: EnginePool, send: Callable[[Granted | Refused], None]) -> None:
        self._pool, self._send = pool, send
        self._loans: dict[int, _Loan] = {}

    @property
    def num_open(self) -> int:
        """Loans that have not ended."""
        return len(self._loans)

    def take(self, message: Ask | Sent | Answered | Broke | GaveUp) -> None:
        """Hear what the borrower says."""
        if isinstance(message, Ask):
            task = asyncio.create_task(self._lend(message), name=f"loan {message.loan}")
            self._loans[message.loan] = _Loan(task)
            # Not by the task itself, which may be cancelled before it has begun.
            task.add_done_callback(lambda _: self._loans.pop(message.loan))
            return
        loan = self._loans.get(message.loan)
        if loan is None:  # it was refused, and the borrower does not know it yet
            return
        match message:
            case Sent():
                if loan.note_sent is not None:
                    loan.note_sent()
            case GaveUp():
                loan.task.cancel()
            case Answered():
                if loan.answer is not None and not loan.answer.done():
                    loan.answer.set_result(message)
            case Broke():
                if loan.answer is not None and not loan.answer.done():
                    loan.answer.set_exception(message.error)

    def close(self) -> None:
        """The borrower is gone: end its requests."""
        for loan in self._loans.values():
            loan.task.cancel()

    async def _lend(self, ask: Ask) -> None:
        try:
            await self._pool.request(
                partial(self._hand_over, ask.loan),
                ask.prompt_tokens,
                ask.max_new_tokens,
                rollout_id=ask.rollout_id,
                group_id=ask.group_id,
            )
        except EngineError as error:
            self._send(Refused(ask.loan, error))
        except asyncio.CancelledError:  # given up, or this process ends
            self._send(Refused(ask.loan, EngineError("the request was given up")))
            raise

    async def _hand_over(
        self, number: int, permit: Permit, note_sent: Callable[[], None]
    ) -> Answered:
        """The request as the engine sees it: from the permit to the answer."""
        loan = self._loans[number]
        loan.answer = asyncio.get_running_loop().create_future()
        loan.note_sent = note_sent
        self._send(Granted(number, permit))
        return await loan.answer
