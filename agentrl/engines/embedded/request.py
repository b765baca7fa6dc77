"""One call of `generate` on its way through the embedded engine."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from agentrl.types import FinishReason, Generation, SamplingParams

__all__ = ["Request", "natural_order"]

NaturalOrder: TypeAlias = tuple[tuple[bool, int, str], ...]


def natural_order(text: str) -> NaturalOrder:
    """A sort key under which numbers in a string count as numbers: `r2` before `r10`."""
    parts = re.split(r"(\d+)", text)
    return tuple(
        (False, int(part), "") if part.isdecimal() else (True, 0, part) for part in parts if part
    )


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, how to continue it, and what has been sampled so far.

    `cached_tokens` is None until the request has had a slot. The lists below it have one entry
    per sampled token. `first_token_at` is on the monotonic clock.
    """

    prompt: NDArray[np.int32]
    params: SamplingParams
    future: asyncio.Future[Generation]
    rollout_id: str
    arrival: int
    seed: int = field(init=False)
    cached_tokens: int | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    first_token_at: float | None = None
    routed_experts: NDArray[np.int16] | None = None
    _rollout_order: NaturalOrder = field(init=False)

    def __post_init__(self) -> None:
        seed = self.params.seed
        self.seed = secrets.randbits(64) if seed is None else seed
        self._rollout_order = natural_order(self.rollout_id)

    @property
    def order(self) -> tuple[bool, NaturalOrder, int]:
        """Who is placed first: requests that have begun, then by rollout, then by arrival."""
        return (self.cached_tokens is None, self._rollout_order, self.arrival)

    @property
    def caller(self) -> object:
        """What stands for the request's caller: calls of one rollout count once."""
        return self.rollout_id or self.arrival

    def known_tokens(self) -> NDArray[np.int32]:
        """The prompt and what was sampled."""
        return np.concatenate([self.prompt, np.array(self.token_ids, dtype=np.int32)])

    def append(self, token_id: int, logprob: float, version: int) -> bool:
        """Take one sampled token; True when it ends the request."""
        if self.first_token_at is None:
            self.first_token_at = time.monotonic()
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.weight_versions.append(version)
        return self._stopped or len(self.token_ids) >= self.params.max_new_tokens

    def finish(self, reason: FinishReason | None = None) -> None:
        """Deliver what was sampled; without a reason, `stop` or `length` as the tokens say."""
        if self.future.done():
            return
        self.future.set_result(
            Generation(
                token_ids=np.array(self.token_ids, dtype=np.int32),
                logprobs=np.array(self.logprobs, dtype=np.float32)
                if self.params.logprobs
                else None,
                weight_versions=np.array(self.weight_versions, dtype=np.int32),
                finish_reason=reason or ("stop" if self._stopped else "length"),
                cached_tokens=self.cached_tokens or 0,
                temperature=self.params.temperature,
                routed_experts=self.routed_experts,
            )
        )

    def fail(self, error: Exception) -> None:
        """Raise `error` where the request is awaited."""
        if not self.future.done():
            self.future.set_exception(error)

    @property
    def _stopped(self) -> bool:
        return bool(self.token_ids) and self.token_ids[-1] in self.params.stop_token_ids
