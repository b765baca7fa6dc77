"""Attention over a tree of tokens on a CPU, forwards and backwards, without a mask where it counts.

In depth-first order, a chain of nodes without a fork is seen by itself causally and by all of its
descendants wholly; together they are one run of rows. One call of torch's causal flash attention,
with the run as queries and the chain as keys, computes exactly these pairs (its causal mask is
aligned at the top left, so that every row past the chain's end sees the whole chain). The partial
results of a row are merged by their log-sum-exp. In backward, the same calls with the merged
result and log-sum-exp give exact gradients: a probability is exp(score - log-sum-exp), whichever
part of the keys it is for.

Bushy subtrees of short chains would be many small calls. They become blocks: runs of whole subtrees
that attend within themselves under a mask, all blocks of about a size in one call.

A tree may go on from nodes that were computed before, its past: a path that the first of its rows
see. These keys are chains too, seen wholly by the rows that descend from them.

Shapes: H heads, T nodes, P nodes of the past, D head size, B blocks of S nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = [
    "Blocks",
    "Chain",
    "PastChain",
    "TreePieces",
    "cut_pieces",
    "flash",
    "flash_backward",
    "for_heads_of",
    "tree_attention",
]

LONG_CHAIN = 64
"""A chain of so many nodes is worth a call of its own."""
BLOCK_NODES = 128
"""Most nodes of a block."""

flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, slots=True)
class Chain:
    """Keys start .. end, seen by the rows start .. subtree_end; `root` if no key precedes them."""

    start: int
    end: int
    subtree_end: int
    root: bool


@dataclass(frozen=True, slots=True)
class PastChain:
    """Keys start .. end of the past, seen by the rows 0 .. rows."""

    start: int
    end: int
    rows: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """Runs of whole subtrees, padded to one size: nodes[B, S], of which valid[B * S] are none of
    the padding (as indices), and seen[B, 1, S, S]: whether row q sees row k."""

    nodes_BS: Tensor
    valid: Tensor
    seen: Tensor


@dataclass(frozen=True, slots=True)
class TreePieces:
    """How the attention of a tree is cut: every pair of node and ancestor is in exactly one."""

    chains: tuple[Chain, ...]
    blocks: tuple[Blocks, ...]
    past: tuple[PastChain, ...] = ()


def cut_pieces(
    positions: NDArray[np.int64],
    subtree_end: NDArray[np.int64],
    past_rows: NDArray[np.int64] | None = None,
) -> TreePieces:
    """Cut the tree that `TokenTrie` describes into chains and blocks.

    past_rows[P] says how many rows, from the first on, see each node of the past, if there is one.
    """
    size = len(positions)
    follows = (np.diff(positions) == 1) & (np.diff(subtree_end) == 0)
    starts = np.concatenate([[0], np.flatnonzero(~follows) + 1])
    ends = np.append(starts[1:], size)
    chains: list[Chain] = []
    runs: list[tuple[int, int]] = []
    i = 0
    while i < len(starts):
        start, end, last = int(starts[i]), int(ends[i]), int(subtree_end[starts[i]])
        if end - start >= LONG_CHAIN or last - start > BLOCK_NODES:
            chains.append(Chain(start, end, last, root=positions[start] == 0))
            i += 1
            continue
        if runs and runs[-1][1] == start and last - runs[-1][0] <= BLOCK_NODES:
            runs[-1] = (runs[-1][0], last)
        else:
            runs.append((start, last))
        i = int(np.searchsorted(starts, last))
    past = () if past_rows is None else tuple(_past_chains(past_rows))
    return TreePieces(tuple(chains), tuple(_stack_runs(runs, subtree_end)), past)


def _past_chains(past_rows: NDArray[np.int64]) -> Iterator[PastChain]:
    """Put neighbours that are seen by the same rows together."""
    bounds = np.flatnonzero(np.diff(past_rows, prepend=-1, append=-1)).tolist()
    for start, end in pairwise(bounds):
        if past_rows[start] > 0:
            yield PastChain(start, end, int(past_rows[start]))


def _stack_runs(runs: list[tuple[int, int]], subtree_end: NDArray[np.int64]) -> Iterator[Blocks]:
    """Put runs whose lengths have the same number of bits together."""
    by_bits: dict[int, list[tuple[int, int]]] = {}
    for start, end in runs:
        by_bits.setdefault((end - start - 1).bit_length(), []).append((start, end))
    for _, members in sorted(by_bits.items()):
        bounds = np.array(members)
        width = int((bounds[:, 1] - bounds[:, 0]).max())
        nodes = bounds[:, :1] + np.arange(width)
        inside = nodes < bounds[:, 1:]
        # A node of the padding repeats one of the run, and is seen by itself alone.
        nodes = np.where(inside, nodes, bounds[:, :1])
        last = np.where(inside, subtree_end[nodes] - bounds[:, :1], np.arange(width) + 1)
        row = np.arange(width)
        seen = (row[:, None] >= row) & (row[:, None] < last[:, None, :])
        yield Blocks(
            torch.from_numpy(nodes),
            torch.from_numpy(np.flatnonzero(inside)),
            torch.from_numpy(seen[:, None]),
        )


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pieces: TreePieces,
    scale: float,
    past: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attend from query [1, H, T, D] to the ancestors' key and value [1, H, T, D]; like `query`.

    `past` holds key and value [1, H, P, D] of the nodes that `pieces.past` is about.
    """
    past_key, past_value = past or (None, None)
    result: Tensor = _TreeAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, past_key, past_value, pieces, scale
    )
    return result


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        past_key: Tensor | None,
        past_value: Tensor | None,
        pieces: TreePieces,
        scale: float,
    ) -> Tensor:
        size = query.shape[2]
        sums = torch.float64 if query.dtype == torch.float64 else torch.float32
        # Time before heads in memory, as the model's next layer wants it.
        out = query.new_zeros((1, size, query.shape[1], value.shape[3]), dtype=sums).transpose(1, 2)
        lse = query.new_full((1, query.shape[1], size), -torch.inf, dtype=sums)
        for chain in pieces.chains:
            rows, keys = slice(chain.start, chain.subtree_end), slice(chain.start, chain.end)
            part, part_lse = flash(
                query[:, :, rows], key[:, :, keys], value[:, :, keys], 0.0, True, scale=scale
            )
            if chain.root:
                out[:, :, rows], lse[:, :, rows] = part, part_lse
            else:
                _merge(out[:, :, rows], lse[:, :, rows], part, part_lse)
        for blocks in pieces.blocks:
            q, k, v = (_gather(x, blocks) for x in (query, key, value))
            part, part_lse = flash(q, k, v, 0.0, False, attn_mask=_mask(blocks, q), scale=scale)
            part, part_lse = _pick(part, blocks), _pick(part_lse.unsqueeze(-1), blocks).squeeze(-1)
            nodes = blocks.nodes_BS.flatten()[blocks.valid]
            old, old_lse = out[:, :, nodes], lse[:, :, nodes]
            _merge(old, old_lse, part, part_lse)
            out[:, :, nodes], lse[:, :, nodes] = old, old_lse
        for past in pieces.past:
            rows, keys = slice(0, past.rows), slice(past.start, past.end)
            part, part_lse = flash(
                query[:, :, rows],
                *_part_of(past_key, past_value, keys),
                0.0,
                False,
                scale=scale,
            )
            _merge(out[:, :, rows], lse[:, :, rows], part, part_lse)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, past_key, past_value, out, lse)
        ctx.pieces, ctx.scale = pieces, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, past_key, past_value, out, lse = ctx.saved_tensors
        grads = [torch.zeros_like(x) for x in (query, key, value)]
        for chain in ctx.pieces.chains:
            rows, keys = slice(chain.start, chain.subtree_end), slice(chain.start, chain.end)
            of_rows = [x[:, :, rows] for x in (grad_out, query, out, lse)]
            of_keys = [x[:, :, keys] for x in (key, value)]
            parts = _partial_backward(of_rows, of_keys, True, None, ctx.scale)
            grads[0][:, :, rows] += parts[0]
            grads[1][:, :, keys], grads[2][:, :, keys] = parts[1], parts[2]
        for blocks in ctx.pieces.blocks:
            of_rows = [_gather(x, blocks) for x in (grad_out, query, out)]
            of_rows.append(_gather(lse.unsqueeze(-1), blocks).squeeze(-1))
            of_keys = [_gather(x, blocks) for x in (key, value)]
            mask = _mask(blocks, of_rows[1])
            parts = _partial_backward(of_rows, of_keys, False, mask, ctx.scale)
            nodes = blocks.nodes_BS.flatten()[blocks.valid]
            grads[0][:, :, nodes] += _pick(parts[0], blocks)
            grads[1][:, :, nodes] = _pick(parts[1], blocks)
            grads[2][:, :, nodes] = _pick(parts[2], blocks)
        past_grads: list[Any] = [
            None if x is None else torch.zeros_like(x) for x in (past_key, past_value)
        ]
        for past in ctx.pieces.past:
            rows, keys = slice(0, past.rows), slice(past.start, past.end)
            of_rows = [x[:, :, rows] for x in (grad_out, query, out, lse)]
            of_keys = _part_of(past_key, past_value, keys)
            parts = _partial_backward(of_rows, of_keys, False, None, ctx.scale)
            grads[0][:, :, rows] += parts[0]
            past_grads[0][:, :, keys], past_grads[1][:, :, keys] = parts[1], parts[2]
        return *grads, *past_grads, None, None


def for_heads_of(query: Tensor, x: Tensor) -> Tensor:
    """Keys or values [1, K, T, D] once for each head of the query [1, H, T, D]."""
    groups = query.shape[1] // x.shape[1]
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def _part_of(key: Tensor | None, value: Tensor | None, keys: slice) -> list[Tensor]:
    assert key is not None, "pieces with a past need its keys"
    assert value is not None, "and its values"
    return [key[:, :, keys], value[:, :, keys]]


def _partial_backward(
    of_rows: list[Tensor],
    of_keys: list[Tensor],
    causal: bool,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_out, query, out, lse = of_rows
    key, value = of_keys
    parts: tuple[Tensor, Tensor, Tensor] = flash_backward(
        grad_out, query, key, value, out, lse, 0.0, causal, attn_mask=mask, scale=scale
    )
    return parts


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge the attention over further keys into `out` and `lse`, in place."""
    both = torch.logaddexp(lse, part_lse)
    out.mul_((lse - both).exp_().unsqueeze(-1))
    out.addcmul_(part.to(out.dtype), (part_lse - both).exp_().unsqueeze(-1))
    lse.copy_(both)


def _gather(x: Tensor, blocks: Blocks) -> Tensor:
    """[1, H, T, D] -> [B, H, S, D]."""
    return x[0][:, blocks.nodes_BS].transpose(0, 1)


def _pick(x: Tensor, blocks: Blocks) -> Tensor:
    """[B, H, S, D] -> [1, H, valid, D]."""
    return x.transpose(0, 1).flatten(1, 2)[:, blocks.valid].unsqueeze(0)


def _mask(blocks: Blocks, like: Tensor) -> Tensor:
    mask = torch.zeros(blocks.seen.shape, dtype=like.dtype)
    return mask.masked_fill_(~blocks.seen, -torch.inf)
