"""Attention over a `TokenTrie`, as an attention implementation of transformers.

The model runs on one row, all nodes of the tree with their depths as positions; what each attends
to travels through its keyword arguments as a `TreePlan`. On a GPU it is a block mask for
FlexAttention, which skips the blocks that nobody sees, but for what plain causal attention does
faster: a tree that is a single path, and long chains (`tree_chains`); on a CPU see `tree_kernel`.

The nodes may be a part of a larger tree whose other parts are computed at other times; their `Past`
then brings the keys and values of the ancestors that are missing.

Shapes: H query heads, K key/value heads, T nodes, P nodes of the past, D head size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
)
from transformers import AttentionInterface

from agentrl.train.tree_chains import LongChain, long_chains, merge_chains, takes_chains
from agentrl.train.tree_kernel import TreePieces, cut_pieces, for_heads_of, tree_attention

__all__ = [
    "TREE_ATTENTION",
    "KeyValue",
    "Past",
    "TreePlan",
    "UnsupportedAttentionError",
    "attend_over_tree",
    "causal_attention",
    "compiled_size",
    "flex_tree_attention",
]

TREE_ATTENTION = "agentrl_tree"
"""The name under which transformers knows it."""

KeyValue: TypeAlias = tuple[Tensor, Tensor]

COMPILED_MULTIPLE = 128
"""FlexAttention's block."""

RECURRING = 128
"""After so many trees of one size it gets a kernel of its own, whose backward pass is 1.4 times as
fast (on an H200): about when the others together have lost the seconds that compiling takes."""

_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


class UnsupportedAttentionError(ValueError):
    """The model asks for a kind of attention that this one is not."""


class Past(Protocol):
    """Ancestors of a tree's first nodes, computed before.

    `rows_P` says how many rows, from the first on, see each of them (int64).
    """

    rows_P: NDArray[np.int64]

    def exchange(self, layer: int, own: KeyValue) -> tuple[KeyValue, KeyValue]:
        """Take the nodes' own key and value [1, K, T, D] of a layer; returns those to attend to in
        their place, and those [1, K, P, D] of the past."""


class TreePlan:
    """What every layer needs to know of one tree; made once for each forward pass.

    `positions_1T` (depths, int64) is on the model's device.
    """

    def __init__(
        self,
        positions_T: NDArray[np.int64],
        subtree_end_T: NDArray[np.int64],
        device: torch.device,
        past: Past | None = None,
    ) -> None:
        self._positions_T, self._subtree_end_T = positions_T, subtree_end_T
        self._device = device
        self.positions_1T = torch.from_numpy(positions_T).to(device).unsqueeze(0)
        self.past = past

    @property
    def num_pairs(self) -> int:
        """Queries, with each key that they attend to: themselves and what stands before."""
        return int(self._positions_T.sum()) + len(self._positions_T)

    @cached_property
    def recurs(self) -> bool:
        """Whether so many trees of this size have been asked for this that it came up often."""
        size = len(self._positions_T), 0 if self.past is None else len(self.past.rows_P)
        _trees_of[size] += 1
        return _trees_of[size] > RECURRING

    @cached_property
    def is_path(self) -> bool:
        """Whether each node attends to all nodes before it, as in causal attention."""
        return self.past is None and bool((self._subtree_end_T == len(self._subtree_end_T)).all())

    @cached_property
    def pieces(self) -> TreePieces:
        """How the CPU cuts the work."""
        past_rows = None if self.past is None else self.past.rows_P
        return cut_pieces(self._positions_T, self._subtree_end_T, past_rows)

    @cached_property
    def long_chains(self) -> tuple[LongChain, ...]:
        """What a GPU need not leave to FlexAttention."""
        return long_chains(self.pieces.chains)

    @cached_property
    def block_mask(self) -> BlockMask:
        """Which blocks a GPU visits; the keys of the past stand before those of the nodes."""
        return self._block_mask(())

    @cached_property
    def rest_mask(self) -> BlockMask:
        """The same without the pairs of `long_chains`."""
        return self._block_mask(self.long_chains)

    def _block_mask(self, without: Sequence[LongChain]) -> BlockMask:
        size = len(self._subtree_end_T)
        first, end = np.arange(size), self._subtree_end_T
        for chain in without:
            first[chain.keys] = chain.rows_end
        if self.past is not None:
            end = np.concatenate([self.past.rows_P, end])
            first = np.concatenate([np.zeros_like(self.past.rows_P), first])
        first_K, end_K = (torch.from_numpy(rows).to(self._device) for rows in (first, end))

        def seen(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= first_K[k]) & (q < end_K[k])

        return create_block_mask(seen, None, None, size, len(end), device=self._device)


def flex_tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: TreePlan,
    scale: float,
    attend: Callable[..., Any] = flex_attention,
    *,
    chains_apart: bool = False,
) -> Tensor:
    """Attend from query [1, H, T, D] to the ancestors' key and value [1, K, P + T, D]; like
    `query`.

    `attend` is FlexAttention, compiled or not. With `chains_apart` it does not get the plan's
    `long_chains`.
    """
    grouped = query.shape[1] != key.shape[1]
    chains = plan.long_chains if chains_apart else ()
    if not chains:
        result: Tensor = attend(
            query, key, value, block_mask=plan.block_mask, scale=scale, enable_gqa=grouped
        )
        return result
    part, aux = attend(
        query,
        key,
        value,
        block_mask=plan.rest_mask,
        scale=scale,
        enable_gqa=grouped,
        return_aux=AuxRequest(lse=True),
    )
    own = slice(-query.shape[2], None)
    return merge_chains(query, key[:, :, own], value[:, :, own], part, aux.lse, chains, scale)


def compiled_size(size: int) -> int:
    """The number of nodes to pad to on a GPU: FlexAttention works in whole blocks."""
    return -(-size // COMPILED_MULTIPLE) * COMPILED_MULTIPLE


_trees_of: Counter[tuple[int, int]] = Counter()
"""How many trees of T nodes and P of the past there were."""


def _compiled_flex(plan: TreePlan) -> Callable[..., Any]:
    """FlexAttention, compiled for trees of any size, or for the size of `plan` if it recurs."""

    def attend(*arguments: Any, **options: Any) -> Any:
        # Each size that recurs, and trees of one or two blocks, are compiled apart.
        with torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=1024):
            return _compile(dynamic=not plan.recurs)(*arguments, **options)

    return attend


@cache
def _compile(*, dynamic: bool) -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=dynamic)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attend from query [1, H, T, D] to the key and value [1, K, T, D] of each node and all before
    it; like `query`."""
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
    )


def attend_over_tree(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    agentrl_tree: TreePlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' signature: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, D]."""
    if agentrl_tree is None:
        raise ValueError("a model whose attention runs over trees was called without one")
    _check(query, value, dropout, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    own, past = (key, value), None
    if agentrl_tree.past is not None:
        own, past = agentrl_tree.past.exchange(int(module.layer_idx), own)  # type: ignore[arg-type]
    if query.is_cuda and agentrl_tree.is_path:
        out = causal_attention(query, key, value, scale)
    elif query.is_cuda:
        if past is not None:
            own = torch.cat([past[0], own[0]], dim=2), torch.cat([past[1], own[1]], dim=2)
        attend, apart = _compiled_flex(agentrl_tree), takes_chains(query)
        out = flex_tree_attention(query, *own, agentrl_tree, scale, attend, chains_apart=apart)
    else:
        own = for_heads_of(query, own[0]), for_heads_of(query, own[1])
        if past is not None:
            past = for_heads_of(query, past[0]), for_heads_of(query, past[1])
        out = tree_attention(query, *own, agentrl_tree.pieces, scale, past)
    return out.transpose(1, 2).contiguous(), None


def _check(query: Tensor, value: Tensor, dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout > 0:
        raise UnsupportedAttentionError("it drops attention weights at random")
    if value.shape[-1] != query.shape[-1]:
        raise UnsupportedAttentionError("its values and keys differ in size")
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise UnsupportedAttentionError(f"its attention has {name}")


AttentionInterface.register(TREE_ATTENTION, attend_over_tree)
