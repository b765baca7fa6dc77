"""The tokens of one growing context: what was given, what was sampled, and from which policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl.errors import EngineError
from agentrl.types import Generation, Sequence, Turn

__all__ = ["TokenRecord", "join_routes"]


@dataclass(slots=True)
class _Span:
    """One sampled turn: `generation` begins at index `start`."""

    start: int
    generation: Generation
    reward: float | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.generation.token_ids)


class TokenRecord:
    """Ids in order, with the spans that the policy sampled. Append only.

    The one exception is `truncate`, which takes back given tokens that follow the last span.
    """

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self._spans: list[_Span] = []

    def __len__(self) -> int:
        return len(self.token_ids)

    def extend(self, token_ids: list[int]) -> None:
        """Append tokens that the policy did not sample."""
        self.token_ids.extend(token_ids)

    def sample(self, generation: Generation) -> None:
        """Append one turn of the policy."""
        self._spans.append(_Span(len(self.token_ids), generation))
        self.token_ids.extend(generation.token_ids.tolist())

    def truncate(self, length: int) -> None:
        """Take back the given tokens from `length` on."""
        if self._spans and length < self._spans[-1].end:
            raise ValueError(f"cannot truncate to {length}: sampled tokens are never taken back")
        del self.token_ids[length:]

    def set_reward(self, reward: float | None) -> None:
        """Give the last turn its reward."""
        self._spans[-1].reward = reward

    def sequence(self) -> Sequence | None:
        """The context up to its last sampled turn; None if nothing was sampled.

        Given tokens after the last turn were never attended to by the policy: they are left out.

        Raises:
            EngineError: only some turns have log-probabilities.
        """
        spans = self._spans
        if not spans:
            return None
        length = spans[-1].end
        mask = np.zeros(length, dtype=np.bool_)
        versions = np.full(length, -1, dtype=np.int32)
        reported = [span for span in spans if span.generation.logprobs is not None]
        if len(reported) not in (0, len(spans)):
            raise EngineError(
                f"the engine gave log-probabilities for {len(reported)} of {len(spans)} turns: "
                "ask for them in every turn or in none"
            )
        logprobs = np.full(length, np.nan, dtype=np.float32) if reported else None
        for span in spans:
            mask[span.start : span.end] = True
            versions[span.start : span.end] = span.generation.weight_versions
            if logprobs is not None and span.generation.logprobs is not None:
                logprobs[span.start : span.end] = span.generation.logprobs
        return Sequence(
            token_ids=np.array(self.token_ids[:length], dtype=np.int32),
            response_mask=mask,
            logprobs=logprobs,
            weight_versions=versions,
            routed_experts=join_routes([span.generation for span in spans], length),
            turns=tuple(
                Turn(
                    start=span.start,
                    end=span.end,
                    finish_reason=span.generation.finish_reason,
                    reward=span.reward,
                    cached_tokens=span.generation.cached_tokens,
                    temperature=span.generation.temperature,
                )
                for span in spans
            ),
        )


def join_routes(calls: list[Generation], length: int) -> NDArray[np.int16] | None:
    """The experts [length, layers, k] of a context that several engine calls computed.

    A token keeps the experts of the first call that computed it, which is when what follows was
    sampled; -1 after the last. None where no call tells them.

    Raises:
        EngineError: only some calls tell them.
    """
    told = [call.routed_experts for call in calls if call.routed_experts is not None]
    if not told:
        return None
    if len(told) != len(calls):
        raise EngineError(
            f"the engine told the experts of {len(told)} of {len(calls)} calls: ask for them in "
            "every call or in none"
        )
    joined = np.full((length, *told[0].shape[1:]), -1, dtype=np.int16)
    known = 0
    for routes in told:
        joined[known : len(routes)] = routes[known:length]
        known = max(known, len(routes))
    return joined
