"""Which experts every cached token went to, by slot: copied and overwritten as its keys are.

Legend: S slots, N positions, L layers with experts, k experts of a token, B rows of W new tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from agentrl.models.routing import UNKNOWN, Routers

__all__ = ["RouteTable"]


class RouteTable:
    """The experts that a model has chosen, int16 [S, N, L, k]."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Listen to the model's routers.

        Raises:
            UsageError: it has none.
        """
        self._routers = Routers(model)
        shape = (0, 0, self._routers.num_layers, self._routers.top_k)
        self._table = np.full(shape, UNKNOWN, dtype=np.int16)

    def note(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        """Write down what the last forward pass chose; slots [B], positions [B, W]."""
        self._reserve(int(slots.max()) + 1, int(positions.max()) + 1)
        taken = self._routers.taken().cpu().numpy()
        self._table[slots[:, None], positions] = taken.reshape(*positions.shape, *taken.shape[1:])

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        self._reserve(max(source, target) + 1, length)
        self._table[target, :length] = self._table[source, :length]

    def of(self, slot: int, length: int) -> NDArray[np.int16]:
        """The experts [length, L, k] of a slot's first tokens."""
        return self._table[slot, :length].copy()

    def _reserve(self, slots: int, length: int) -> None:
        have_slots, have_length = self._table.shape[:2]
        if slots <= have_slots and length <= have_length:
            return
        more = (max(slots - have_slots, 0), max(length - have_length, have_length // 4, 0))
        widths = ((0, more[0]), (0, more[1]), (0, 0), (0, 0))
        self._table = np.pad(self._table, widths, constant_values=UNKNOWN)
