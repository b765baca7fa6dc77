"""How one kind of server is asked for tokens, whichever process does the asking.

The engine admits a request and gives it a `Permit`; what is sent to the server is a function of the
request, the permit and the limits alone. So another process can send a request of an engine that it
does not have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from agentrl.engines.answer import Place, Sampled, checked_generation
from agentrl.engines.http import EngineClient
from agentrl.engines.request_check import EngineLimits, check_request
from agentrl.errors import EngineError
from agentrl.types import Generation, SamplingParams

__all__ = ["Permit", "TokenRoute"]


@dataclass(frozen=True, slots=True)
class Permit:
    """What one admitted request is sent with."""

    request_id: str
    """What the server knows the request by."""
    url: str
    """Where it is sent."""
    label: str
    """Names the engine in messages."""
    version: int
    """Of the weights that the engine held when the request was admitted."""
    cache_salt: str
    """Another one with other weights: prefixes are found by requests of the same salt alone."""
    place: Place
    adapter: str | None = None
    """What the server calls the LoRA adapter to sample with."""
    computes_only: bool = False
    """Whether nothing is to be sampled: the prompt is computed for those that have the same."""
    found: int | None = None
    """How many tokens of the prompt were cached before it was computed for all that have it."""


class TokenRoute(ABC):
    """One kind of server's route for tokens.

    Attributes:
        limits: what a request must keep within.
        knows_versions: whether the server says which weights sampled each token; its first answer
            shows it.
    """

    kind: ClassVar[str]

    def __init__(self, limits: EngineLimits) -> None:
        self.limits = limits
        self.knows_versions = True

    def check(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        """Refuse what the server would not sample as asked.

        Raises:
            ContextOverflowError: prompt and new tokens do not fit the context.
            EngineError: anything else.
        """
        check_request(self.kind, token_ids, params, self.limits)

    async def sample(
        self,
        client: EngineClient,
        token_ids: Sequence[int],
        params: SamplingParams,
        permit: Permit,
        sent: Callable[[], None],
    ) -> Generation:
        """Send a request that was checked and admitted, and read its answer.

        Its `cached_tokens` are what was cached before anything was computed for this request.

        Args:
            client: of `permit.url`.
            token_ids: the prompt.
            params: how to sample.
            permit: says what to send it with.
            sent: called when the whole request is written.

        Raises:
            EngineError: no answer came, or not what was asked for.
        """
        if permit.computes_only:
            params = replace(params, logprobs=False)
        try:
            sampled = await self._ask(client, token_ids, params, permit, sent)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(
                f"the answer of {permit.label} is not that of a {self.kind} server "
                f"({type(error).__name__}: {error}): see whether {permit.url} is one, of a version "
                "that docs/engines.md names"
            ) from error
        if permit.found is not None:
            sampled = replace(sampled, cached_tokens=min(permit.found, sampled.cached_tokens))
        if sampled.spans is None:
            # No update met the request, or only after it had been ended: see `RemoteEngine.pause`.
            length = len(sampled.token_ids)
            self.knows_versions = self.knows_versions and length == 0
            sampled = replace(sampled, spans=[(str(permit.version), 0, length)])
        experts = self.limits.experts is not None
        return checked_generation(sampled, params, permit.label, experts=experts)

    @abstractmethod
    async def _ask(
        self,
        client: EngineClient,
        token_ids: Sequence[int],
        params: SamplingParams,
        permit: Permit,
        sent: Callable[[], None],
    ) -> Sampled:
        """Send the request."""
