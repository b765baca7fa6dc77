"""The long chains of a tree by the fastest causal attention there is, beside FlexAttention.

FlexAttention computes any tree, and about half as fast as a kernel for causal attention. In most
trees nearly all pairs are those of one long chain without a fork, such as a prompt, with its
descendants: one call of cuDNN's causal attention for the chain itself, and one without a mask for
the rows after it. FlexAttention has the other pairs; the results of a row are merged by their
log-sum-exp, and backwards every part gets the gradients that are its own (see `tree_kernel`).

cuDNN prepares a kernel for each new size, so that chains are cut to few different sizes; what is
cut off is left to FlexAttention.

Shapes: H query heads, K key/value heads, T nodes, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentrl.train.tree_kernel import Chain, flash, flash_backward, for_heads_of

__all__ = ["LongChain", "long_chains", "merge_chains", "takes_chains"]

KEYS_STEP, ROWS_STEP = 512, 1024
"""Sizes are cut to multiples of these."""
LEAST_PAIRS = 2**23
"""Pairs of row and key that are worth two launches a layer."""

_cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
_cudnn_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward


@dataclass(frozen=True, slots=True)
class LongChain:
    """Keys start .. keys_end, seen by the rows start .. rows_end from themselves on."""

    start: int
    keys_end: int
    rows_end: int

    @property
    def keys(self) -> slice:
        """All keys."""
        return slice(self.start, self.keys_end)

    @property
    def calls(self) -> list[tuple[slice, bool]]:
        """Rows that attend to the keys, and whether causally."""
        own, after = self.keys, slice(self.keys_end, self.rows_end)
        return [(own, True), *([(after, False)] if self.keys_end < self.rows_end else [])]


def long_chains(chains: Iterable[Chain]) -> tuple[LongChain, ...]:
    """Those that are worth calls of their own, cut to their sizes."""
    found = []
    for chain in chains:
        keys = (chain.end - chain.start) // KEYS_STEP * KEYS_STEP
        rows = (chain.subtree_end - chain.start) // ROWS_STEP * ROWS_STEP
        if keys <= rows and keys * rows >= LEAST_PAIRS:
            found.append(LongChain(chain.start, chain.start + keys, chain.start + rows))
    return tuple(found)


def takes_chains(query: Tensor) -> bool:
    """Whether cuDNN has a kernel for it."""
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] in (64, 128)
        and torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
        and torch.cuda.get_device_capability(query.device) >= (9, 0)
    )


def merge_chains(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    part: Tensor,
    part_lse: Tensor,
    chains: Sequence[LongChain],
    scale: float,
) -> Tensor:
    """Add the attention to long chains to `part`, which is that to all other keys.

    Args:
        query: [1, H, T, D].
        key, value: [1, K, T, D], each of a head for H / K of the queries'.
        part: attention to the other keys [1, H, T, D], with its log-sum-exp part_lse[1, H, T]
            (float32): -inf, and 0 in `part`, where a row sees none.
        chains: no row and key are in two of them.
        scale: of the products of queries and keys.
    """
    result: Tensor = _MergedChains.apply(  # type: ignore[no-untyped-call]
        query, key, value, part, part_lse, tuple(chains), scale
    )
    return result


class _MergedChains(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        part: Tensor,
        part_lse: Tensor,
        chains: tuple[LongChain, ...],
        scale: float,
    ) -> Tensor:
        out, lse, seeds = part.clone(), part_lse.clone(), []
        for rows, keys, causal in _calls(chains):
            own, own_lse, seed = _forward(
                query[:, :, rows],
                for_heads_of(query, key[:, :, keys]),
                for_heads_of(query, value[:, :, keys]),
                causal,
                scale,
            )
            both = torch.logaddexp(lse[:, :, rows], own_lse)
            out[:, :, rows] = _weighted(
                out[:, :, rows], (lse[:, :, rows] - both).exp(), own, (own_lse - both).exp()
            )
            lse[:, :, rows] = both
            seeds += seed
        ctx.save_for_backward(query, key, value, part, part_lse, out, lse, *seeds)
        ctx.chains, ctx.scale = chains, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, part, part_lse, out, lse, *seeds = ctx.saved_tensors
        share = (part_lse - lse).exp()
        grad_part, grad_part_lse = _grads_of_part(grad_out, part, out, share)
        grads = [torch.zeros_like(x) for x in (query, key, value)]
        for i, (rows, keys, causal) in enumerate(_calls(ctx.chains)):
            of_rows = [x[:, :, rows] for x in (grad_out, query, out, lse)]
            of_keys = [for_heads_of(query, x[:, :, keys]) for x in (key, value)]
            own = _backward(of_rows, of_keys, seeds[2 * i : 2 * i + 2], causal, ctx.scale)
            grads[0][:, :, rows] += own[0]
            for grad, mine in zip(grads[1:], own[1:], strict=True):
                grad[:, :, keys] += mine.view(1, key.shape[1], -1, *mine.shape[2:]).sum(2)
        return *grads, grad_part, grad_part_lse, None, None


def _calls(chains: Iterable[LongChain]) -> Iterator[tuple[slice, slice, bool]]:
    """Rows, keys, and whether causally."""
    return ((rows, chain.keys, causal) for chain in chains for rows, causal in chain.calls)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Attention, its log-sum-exp [1, H, rows] in float32, and what the backward pass wants back."""
    if not query.is_cuda:
        out, lse = flash(query, key, value, 0.0, causal, scale=scale)
        return out, lse, []
    out, lse, _, _, _, _, *seed, _ = _cudnn(
        query, key, value, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse.view(query.shape[:3]), seed


def _backward(
    of_rows: list[Tensor], of_keys: list[Tensor], seed: list[Tensor], causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad_out, query, out, lse = of_rows
    key, value = of_keys
    grads: tuple[Tensor, Tensor, Tensor]
    if not query.is_cuda:
        grads = flash_backward(grad_out, query, key, value, out, lse, 0.0, causal, scale=scale)
        return grads
    # No bias, and no sequences of several lengths.
    grads = _cudnn_backward(
        grad_out, query, key, value, out, lse.contiguous().unsqueeze(-1), *seed,
        None, None, None, query.shape[2], key.shape[2], 0.0, causal, scale=scale,
    )  # fmt: skip
    return grads


def _weighted(a: Tensor, a_share: Tensor, b: Tensor, b_share: Tensor) -> Tensor:
    """Both, each by its share of a row; computed in float32."""
    return (a * a_share.unsqueeze(-1) + b * b_share.unsqueeze(-1)).to(a.dtype)


def _grads_of_part(
    grad_out: Tensor, part: Tensor, out: Tensor, share: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of a part and of its log-sum-exp, which moves the shares of all parts."""
    sums = share.dtype
    moved = (grad_out.to(sums) * (part.to(sums) - out.to(sums))).sum(-1)
    return (grad_out * share.unsqueeze(-1)).to(part.dtype), share * moved
