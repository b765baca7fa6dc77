"""What a server answered, read into a `Generation`, and what is wrong with an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.errors import EngineError
from agentrl.types import FinishReason, Generation, SamplingParams

__all__ = ["Place", "Sampled", "checked_generation", "version_spans"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the prefix of a request is most likely cached."""

    replica: int | None
    """Data-parallel replica of the server; None where the server chooses."""
    rollout_id: str = ""
    group_id: str = ""
    """Of a group of several: its members begin with one prompt."""

    @property
    def key(self) -> str:
        """The same for requests that share a prefix: their group, or their rollout."""
        return self.group_id or self.rollout_id


@dataclass(frozen=True, slots=True)
class Sampled:
    """An answer as the server gave it. `spans` are (version, start, end) over the tokens, None
    where the server does not know versions."""

    token_ids: Sequence[int]
    logprobs: Sequence[float] | None
    spans: Sequence[tuple[str, int, int]] | None
    finish_reason: FinishReason
    cached_tokens: int
    routed_experts: NDArray[np.int16] | None = None


def version_spans(answer: Mapping[str, Any]) -> list[tuple[str, int, int]] | None:
    """The field `weight_versions` of an answer; None from servers older than the field."""
    if "weight_versions" not in answer:
        return None
    return [(s["version"], s["start"], s["end"]) for s in answer["weight_versions"] or []]


def checked_generation(
    sampled: Sampled, params: SamplingParams, label: str, *, experts: bool
) -> Generation:
    """The answer as the rest of agentrl takes it.

    Args:
        sampled: with `spans`.
        params: what was asked for.
        label: names the engine in messages.
        experts: whether those of every token were asked for.

    Raises:
        EngineError: the answer is not what was asked for.
    """
    ids, spans = sampled.token_ids, sampled.spans or ()
    if sampled.finish_reason == "stop" and (not ids or ids[-1] not in params.stop_token_ids):
        raise EngineError(
            f"{label} ended a turn at token {ids[-1] if ids else None}, which is not in "
            "stop_token_ids: add it there, since the engine always stops at it"
        )
    versions = np.full(len(ids), -1, dtype=np.int32)
    for version, start, end in spans:
        versions[start:end] = int(version)
    if (versions < 0).any():
        raise EngineError(f"{label} does not say which weights sampled each token")
    if params.logprobs and (sampled.logprobs is None or len(sampled.logprobs) != len(ids)):
        raise EngineError(f"{label} left out log-probabilities that were asked for")
    routes = sampled.routed_experts
    if experts and len(ids) and routes is None:
        raise EngineError(
            f"{label} does not tell the experts of tokens: start it with "
            "--enable-return-routed-experts, or set rollout.router_replay false"
        )
    return Generation(
        token_ids=np.asarray(ids, dtype=np.int32),
        logprobs=np.asarray(sampled.logprobs, np.float32) if params.logprobs else None,
        weight_versions=versions,
        finish_reason=sampled.finish_reason,
        cached_tokens=sampled.cached_tokens,
        routed_experts=routes,
    )
