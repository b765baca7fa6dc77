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

__all__ = ["Permit", "Progress", "TokenRoute"]


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
    computes_first: bool = False
    """Whether the prompt is to be computed by itself first: siblings wait for it."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Who is told how far a request is."""

    note_sent: Callable[[], None]
    """To be called when all of it is written to the server."""
    note_computed: Callable[[], None]
    """To be called when its prompt is computed, if the permit says `computes_first`."""


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
        progress: Progress,
    ) -> Generation:
        """Send a request that was checked and admitted, and read its answer.

        Args:
            client: of `permit.url`.
            token_ids: the prompt.
            params: how to sample.
            permit: says what to send it with.
            progress: told how far the request is.

        Raises:
            EngineError: no answer came, or not what was asked for.
        """
        try:
            sampled = await self._ask(client, token_ids, params, permit, progress)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(
                f"the answer of {permit.label} is not that of a {self.kind} server "
                f"({type(error).__name__}: {error}): see whether {permit.url} is one, of a version "
                "that docs/engines.md names"
            ) from error
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
        progress: Progress,
    ) -> Sampled:
        """Send the request."""
