"""Sampling one token for every row of a batch, each row by its own parameters and seed.

Legend: B rows, V vocabulary.

A row's random numbers are a hash of its seed and of how many tokens it has sampled, so that they
do not depend on who shares the batch. Log-probabilities are those of the distribution the token
was drawn from: logits over the temperature, cut to top-k and then top-p and normalised again over
what is kept; while `min_new_tokens` is not reached, stop tokens are no part of it. Greedy rows
(temperature 0) report the log-probability at temperature 1 without truncation: that of the
distribution they are drawn from is always 0 and would say nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.types import SamplingParams

__all__ = ["SamplingBatch", "sample", "uniforms"]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The parameters of B rows as arrays; built when the rows change, used for many steps.

    temperature [B, 1] is 1 for greedy rows. `truncated` lists the rows that use top-k or top-p,
    with their top_k and top_p [len(truncated), 1] (top_k is V where unset).
    """

    seeds: NDArray[np.uint64]
    greedy: NDArray[np.bool_]
    temperature: Tensor | None
    truncated: Tensor | None
    top_k: Tensor
    top_p: Tensor

    @staticmethod
    def of(
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        vocab_size: int,
        device: torch.device,
    ) -> SamplingBatch:
        """Gather the parameters of B requests."""
        temperatures = [p.temperature or 1.0 for p in params]
        cut = [
            row
            for row, p in enumerate(params)
            if p.temperature > 0 and (p.top_p < 1 or 0 < p.top_k < vocab_size)
        ]
        plain = all(t == 1.0 for t in temperatures)
        return SamplingBatch(
            seeds=np.array([seed % 2**64 for seed in seeds], dtype=np.uint64),
            greedy=np.array([p.temperature == 0 for p in params]),
            temperature=None if plain else _column(temperatures, device),
            truncated=torch.tensor(cut, device=device) if cut else None,
            top_k=_column([params[row].top_k or vocab_size for row in cut], device),
            top_p=_column([params[row].top_p for row in cut], device),
        )


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None]


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of SplitMix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195)."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: NDArray[np.uint64], counters: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers in [0, 1) [B], a pure function of each row's seed and counter."""
    # The seed is mixed first: neighbouring seeds must not give shifted copies of one stream.
    mixed = _mixed(_mixed(seeds + _GAMMA) + counters * _GAMMA)
    return (mixed >> np.uint64(12)).astype(np.float64) * 2.0**-52


def sample(
    logits_BV: Tensor,
    batch: SamplingBatch,
    counters: NDArray[np.uint64],
    forbidden: tuple[Sequence[int], Sequence[int]] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Draw one token per row.

    Args:
        logits_BV: logits of the next token, any float dtype.
        batch: the rows' parameters.
        counters: [B], how many tokens each row has sampled before.
        forbidden: (rows, token ids) whose probability is 0: stop tokens before `min_new_tokens`.

    Returns:
        token ids [B] and their log-probabilities [B]; these are not finite where the logits of a
        row were not.
    """
    logits = logits_BV.float()
    if forbidden is not None:
        rows, ids = forbidden
        logits = logits.clone()
        logits[torch.tensor(rows), torch.tensor(ids)] = float("-inf")
    if batch.temperature is not None:
        logits = logits / batch.temperature
    if batch.truncated is not None:
        kept = _truncated(logits[batch.truncated], batch.top_k, batch.top_p)
        logits = logits.index_copy(0, batch.truncated, kept)
    logprobs = torch.log_softmax(logits, dim=-1)
    tokens = _drawn(logprobs, batch, counters)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    return tokens.cpu().numpy(), chosen.cpu().numpy()


def _drawn(logprobs: Tensor, batch: SamplingBatch, counters: NDArray[np.uint64]) -> Tensor:
    """Token ids [B] by inverting the cumulative distribution; the most likely for greedy rows."""
    if batch.greedy.all():
        return logprobs.argmax(dim=-1)
    # Double precision: a float32 sum over a large vocabulary is off by more than rare tokens weigh.
    cumulative = torch.cumsum(logprobs.exp(), dim=-1, dtype=torch.float64)
    u = torch.from_numpy(uniforms(batch.seeds, counters)).to(logprobs.device)
    target = u[:, None] * cumulative[:, -1:]
    # The first index whose sum exceeds the target: a token of probability 0 is never that index.
    tokens = torch.searchsorted(cumulative, target, right=True)[:, 0]
    # Only where a row is not finite can the index leave the vocabulary; its caller then refuses it.
    tokens = tokens.clamp_(max=logprobs.shape[-1] - 1)
    if batch.greedy.any():
        greedy = torch.from_numpy(batch.greedy).to(logprobs.device)
        tokens = torch.where(greedy, logprobs.argmax(dim=-1), tokens)
    return tokens


def _truncated(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Logits with everything outside top-k, then top-p, at minus infinity.

    top-p keeps the fewest most likely tokens whose probability (within top-k) reaches p
    (nucleus sampling, arXiv:1904.09751); exactly k tokens pass top-k, ties going to lower ids.
    """
    ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered.masked_fill(rank >= top_k, float("-inf"))
    probs = torch.softmax(ordered, dim=-1)
    before = torch.cumsum(probs, dim=-1) - probs
    ordered = ordered.masked_fill(before >= top_p, float("-inf"))
    return torch.full_like(logits, float("-inf")).scatter(1, order, ordered)
