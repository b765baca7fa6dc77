"""What is refused before a request is sent to a server, since the server would do worse.

An id outside the vocabulary ends some servers; others sample at another temperature than asked, or
ignore a setting silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.config_engine import refuse_temperature
from agentrl.errors import ContextOverflowError, EngineError
from agentrl.types import SamplingParams

__all__ = ["EngineLimits", "check_request"]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine is asked within."""

    max_model_len: int
    max_num_seqs: int = 64
    request_timeout: float = 1800.0
    vocab_size: int | None = None
    """With it, ids outside the vocabulary are refused here; some servers die of one."""
    experts: tuple[int, int] | None = None
    """Layers, and experts of a token in each, where every answer is to tell them."""


def check_request(
    kind: str, token_ids: Sequence[int], params: SamplingParams, limits: EngineLimits
) -> None:
    """Refuse what an engine of `kind` would not sample as asked.

    Raises:
        ContextOverflowError: prompt and new tokens do not fit the context.
        EngineError: anything else.
    """
    total = len(token_ids) + params.max_new_tokens
    if total > limits.max_model_len:
        raise ContextOverflowError(
            f"{len(token_ids)} prompt tokens and {params.max_new_tokens} new ones do not fit "
            f"engine.max_model_len {limits.max_model_len}"
        )
    if len(token_ids) == 0:
        raise EngineError("the prompt has no tokens: give at least one")
    _check_ids("the prompt", token_ids, limits.vocab_size)
    if params.stop_token_ids:
        _check_ids("stop_token_ids", params.stop_token_ids, limits.vocab_size)
    try:
        refuse_temperature(kind, params.temperature)
    except ValueError as error:
        raise EngineError(str(error)) from error


def _check_ids(what: str, ids: Sequence[int], vocab_size: int | None) -> None:
    low, high = min(ids), max(ids)
    if low < 0 or (vocab_size is not None and high >= vocab_size):
        outside = low if low < 0 else high
        raise EngineError(
            f"{what} has id {outside}, outside the model's vocabulary of {vocab_size}: use the "
            "tokenizer that belongs to the model"
        )
