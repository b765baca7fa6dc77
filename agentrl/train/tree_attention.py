"""Attention over a `TokenTrie`, as an attention implementation of transformers.

The model runs on one row, all nodes of the tree with their depths as positions; what each attends
to travels through its keyword arguments as a `TreePlan`. On a GPU it is a block mask for
FlexAttention, which skips the blocks that nobody sees; on a CPU see `tree_kernel`.

Shapes: H query heads, K key/value heads, T nodes, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface

from agentrl.train.tree_kernel import TreePieces, cut_pieces, tree_attention

__all__ = [
    "TREE_ATTENTION",
    "TreePlan",
    "UnsupportedAttentionError",
    "compiled_size",
    "flex_tree_attention",
]

TREE_ATTENTION = "agentrl_tree"
"""The name under which transformers knows it."""

_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


class UnsupportedAttentionError(ValueError):
    """The model asks for a kind of attention that this one is not."""


class TreePlan:
    """What every layer needs to know of one tree; made once for each forward pass.

    `positions_1T` (depths, int64) and `subtree_end_T` (int64) are on the model's device.
    """

    def __init__(
        self,
        positions_T: NDArray[np.int64],
        subtree_end_T: NDArray[np.int64],
        device: torch.device,
    ) -> None:
        self._positions_T, self._subtree_end_T = positions_T, subtree_end_T
        self.positions_1T = torch.from_numpy(positions_T).to(device).unsqueeze(0)
        self.subtree_end_T = torch.from_numpy(subtree_end_T).to(device)

    @cached_property
    def pieces(self) -> TreePieces:
        """How the CPU cuts the work."""
        return cut_pieces(self._positions_T, self._subtree_end_T)

    @cached_property
    def block_mask(self) -> BlockMask:
        """Which blocks a GPU visits."""
        subtree_end_T = self.subtree_end_T

        def seen(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (q < subtree_end_T[k])

        size = len(subtree_end_T)
        return create_block_mask(seen, None, None, size, size, device=subtree_end_T.device)


def flex_tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: TreePlan,
    scale: float,
    attend: Callable[..., Any] = flex_attention,
) -> Tensor:
    """Attend from query [1, H, T, D] to the ancestors' key and value [1, K, T, D]; like `query`.

    `attend` is FlexAttention, compiled or not.
    """
    grouped = query.shape[1] != key.shape[1]
    result: Tensor = attend(
        query, key, value, block_mask=plan.block_mask, scale=scale, enable_gqa=grouped
    )
    return result


def compiled_size(size: int) -> int:
    """The number of nodes to pad to on a GPU, where each number is compiled once.

    Multiples of 128, of which there are at most eight between a power of two and the next, so that
    padding is an eighth of large trees at most.
    """
    step = max(128, 1 << max((size - 1).bit_length() - 4, 0))
    return -(-size // step) * step


def _compiled_flex(*arguments: Any, **options: Any) -> Any:
    # More sizes than torch would compile one function for before it gives up.
    with torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=1024):
        return _compile_flex()(*arguments, **options)


@cache
def _compile_flex() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=False)


def _attend(
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
    if query.is_cuda:
        out = flex_tree_attention(query, key, value, agentrl_tree, scale, _compiled_flex)
    else:
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        out = tree_attention(query, key, value, agentrl_tree.pieces, scale)
    return out.transpose(1, 2).contiguous(), None


def _check(query: Tensor, value: Tensor, dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout > 0:
        raise UnsupportedAttentionError("it drops attention weights at random")
    if value.shape[-1] != query.shape[-1]:
        raise UnsupportedAttentionError("its values and keys differ in size")
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise UnsupportedAttentionError(f"its attention has {name}")


AttentionInterface.register(TREE_ATTENTION, _attend)
