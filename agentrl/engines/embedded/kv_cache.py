"""Keys and values of every layer, in slots that outlive a request.

Legend: S slots, H key/value heads, L positions, D head size. One pair of tensors [S, H, L, D] per
layer; S and L grow by need. What lies beyond a slot's valid length is finite but meaningless: it
is masked out until it is overwritten. Which positions are valid is the slot table's business.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["KVCache"]

_LENGTH_STEP = 64
"""Positions are added in multiples of this, and by at least a quarter of what there is."""


class KVCache:
    """The key/value tensors of one model."""

    def __init__(self, max_slots: int, max_length: int) -> None:
        self._max_slots = max_slots
        self._max_length = max_length
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.num_slots = 0
        self.length = 0

    def reserve(self, slots: int, length: int) -> None:
        """Make room for `slots` slots of `length` positions; what is cached stays."""
        if slots <= self.num_slots and length <= self.length:
            return
        if slots > self.num_slots:
            self.num_slots = min(self._max_slots, max(slots, 2 * self.num_slots))
        if length > self.length:
            wanted = max(length, self.length + self.length // 4)
            rounded = -(-wanted // _LENGTH_STEP) * _LENGTH_STEP
            self.length = min(self._max_length, rounded)
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = (self._grown(keys), self._grown(values))

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The tensors [S, H, L, D] of one layer, made on first use.

        `key` and `value` [B, H, W, D] give the number of heads, head sizes, dtype and device.
        """
        pair = self._layers.get(index)
        if pair is None:
            shape = (self.num_slots, key.shape[1], self.length)
            pair = (
                key.new_zeros((*shape, key.shape[-1])),
                value.new_zeros((*shape, value.shape[-1])),
            )
            self._layers[index] = pair
        return pair

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        for keys, values in self._layers.values():
            keys[target, :, :length] = keys[source, :, :length]
            values[target, :, :length] = values[source, :, :length]

    def clear(self) -> None:
        """Give all memory back."""
        self._layers.clear()
        self.num_slots = 0
        self.length = 0

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(t.numel() * t.element_size() for pair in self._layers.values() for t in pair)

    def _grown(self, old: Tensor) -> Tensor:
        slots, heads, length, size = old.shape
        # Zeros, not uninitialised memory: a NaN behind the mask would still poison 0 * NaN.
        new = old.new_zeros((self.num_slots, heads, self.length, size))
        new[:slots, :, :length] = old
        return new


def flat_positions(slots: Tensor, positions: Tensor, heads: int, length: int) -> Tensor:
    """Row numbers in a cache seen as [S * H * L, D], ordered as [B, H, W].

    slots [B], positions [B, W], both int64 on the same device.
    """
    head = torch.arange(heads, device=slots.device)
    base = (slots[:, None] * heads + head[None]) * length
    return (base[:, :, None] + positions[:, None, :]).reshape(-1)
