"""Keys and values of a trie that is computed in parts, and the gradients that go back to them.

The parts (chunks) are runs of nodes in depth-first order. Forwards, each leaves its keys and values
here and attends to those of its ancestors. Backwards, the last chunk comes first: what its loss
says of its ancestors' keys and values is added up here, and joins the gradient of their own chunk
when its turn comes. So the gradient is that of the whole trie, with the activations of one chunk.

Shapes: T nodes of the trie, K key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.train.tree_attention import KeyValue

__all__ = ["ChunkPast", "PrefixCache"]


class PrefixCache:
    """Of one trie of `num_nodes` and one model; layers are known by their index."""

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes
        self.values: dict[int, KeyValue] = {}
        """Keys and values [1, K, T, D] by layer."""
        self.grads: dict[int, KeyValue] = {}
        """Gradients of the same, so far; in float32 at least."""

    def layer(self, index: int, like: KeyValue) -> KeyValue:
        """Of one layer, made on first use; `like` gives the heads, sizes, dtype and device."""
        if index not in self.values:
            key, value = (x.new_zeros(self._shape(x)) for x in like)
            self.values[index] = key, value
        return self.values[index]

    def layer_grads(self, index: int) -> KeyValue:
        """The gradients of one layer, zero on first use."""
        if index not in self.grads:
            key, value = (
                torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))
                for x in self.values[index]
            )
            self.grads[index] = key, value
        return self.grads[index]

    def _shape(self, x: Tensor) -> tuple[int, int, int, int]:
        return (1, x.shape[1], self._num_nodes, x.shape[3])


class ChunkPast:
    """What one chunk has to do with the cache, in one pass; a `tree_attention.Past`.

    Args:
        cache: of the trie.
        start, end: the chunk's nodes; what stands behind them in the pass is padding.
        path: the ancestors of the first node.
        rows: how many of the chunk's nodes, from the first on, see each of them.
        backward: the pass leaves no keys but takes gradients; call `collect` after its backward.
    """

    def __init__(
        self,
        cache: PrefixCache,
        start: int,
        end: int,
        path: Tensor,
        rows: NDArray[np.int64],
        *,
        backward: bool,
    ) -> None:
        self.rows_P = rows
        self._cache, self._start, self._end, self._path = cache, start, end, path
        self._backward = backward
        self._leaves: dict[int, KeyValue] = {}

    def exchange(self, layer: int, own: KeyValue) -> tuple[KeyValue, KeyValue]:
        """See `tree_attention.Past`; again in a layer whose activations are computed again."""
        cached = self._cache.layer(layer, own)
        size = self._end - self._start
        if not self._backward:
            for kept, new in zip(cached, own, strict=True):
                kept[:, :, self._start : self._end] = new[:, :, :size]
            return own, (cached[0][:, :, self._path], cached[1][:, :, self._path])
        if layer not in self._leaves:
            key, value = (x[:, :, self._path].requires_grad_() for x in cached)
            self._leaves[layer] = key, value
        grads = self._cache.layer_grads(layer)
        key, value = (
            _AddGradient.apply(x, grad[:, :, self._start : self._end])  # type: ignore[no-untyped-call]
            for x, grad in zip(own, grads, strict=True)
        )
        return (key, value), self._leaves[layer]

    def collect(self) -> None:
        """Add what the backward pass says of the ancestors' keys and values."""
        for layer, leaves in self._leaves.items():
            for grads, leaf in zip(self._cache.layer_grads(layer), leaves, strict=True):
                if leaf.grad is not None:
                    grads.index_add_(2, self._path, leaf.grad.to(grads.dtype))
        self._leaves.clear()


class _AddGradient(torch.autograd.Function):
    """Passes a tensor on; adds `extra`, of its first nodes, to its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, extra: Tensor) -> Tensor:
        ctx.extra = extra
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.to(ctx.extra.dtype, copy=True)
        total[:, :, : ctx.extra.shape[2]] += ctx.extra
        return total.to(grad.dtype), None
