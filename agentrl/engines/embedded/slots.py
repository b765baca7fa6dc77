"""Which tokens the slots hold, and which slot a request gets.

Legend: S slots, N tokens.

A slot remembers the ids whose keys and values are valid in the cache, also after its request has
ended. A new request takes the longest prefix that any slot holds, busy or not: in place where
nothing is lost by it, else as a copy in the slot that was used longest ago. Requests that are
placed together can share too: a later one waits for the wave in which the earlier is computed.
Every choice is a function of what was placed and released before, never of time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Placement", "SlotTable"]

_WAVE_COST = 16
"""Tokens that an extra forward pass costs about as much as: sharing less is not worth a wave."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes: its slot, how many tokens of it are cached, and where from.

    `source` is the slot to copy the cached tokens from, or None where they are in place. The copy
    and the computation of the rest belong to `wave`; a source placed in the same round is
    computed in an earlier one.
    """

    slot: int
    cached: int
    source: int | None
    wave: int


class SlotTable:
    """The ids that each slot's cache is valid for, and who was used last."""

    def __init__(self, num_slots: int) -> None:
        self.tokens = np.zeros((num_slots, 0), dtype=np.int32)
        """[S, N]; a busy slot also holds the ids that are known but not computed yet."""
        self.length = np.zeros(num_slots, dtype=np.int64)
        """[S]: how many of a slot's tokens have valid keys and values."""
        self._busy = np.zeros(num_slots, dtype=np.bool_)
        self._last_used = np.full(num_slots, -1, dtype=np.int64)
        self._waves = np.full(num_slots, -1, dtype=np.int64)
        self._clock = 0

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens per slot."""
        have = self.tokens.shape[1]
        if length > have:
            self.tokens = np.pad(self.tokens, ((0, 0), (0, max(length, 2 * have) - have)))

    def begin_round(self) -> None:
        """Forget the waves: everything placed so far has been computed."""
        self._waves[:] = -1

    def place(self, token_ids: NDArray[np.int32]) -> Placement:
        """Choose a slot for a request and mark it busy. There must be an idle one.

        At most all but the last token are taken as cached: the last one is always computed. The
        slot is valid up to there at once in this table; the caller computes it before use.
        """
        computed = len(token_ids) - 1
        common = self._common_prefix(token_ids[:computed])
        wave = self._waves + 1
        penalty = np.where(common < computed, _WAVE_COST * wave, 0)
        score = common - penalty
        best = int(score.max())
        source = int(score.argmax()) if best > 0 else None
        slot, cached = self._victim(), 0
        if source is not None:
            lossless = (score == best) & ~self._busy & (self.length == common)
            slot = int(lossless.argmax()) if lossless.any() else slot
            source = slot if lossless.any() else source
            cached = int(common[source])
        placed = Placement(
            slot=slot,
            cached=cached,
            source=None if source == slot else source,
            wave=0 if source is None else int(wave[source]),
        )
        self._occupy(placed, token_ids)
        return placed

    def release(self, slot: int) -> None:
        """End a request; what is valid of its tokens stays until the slot is taken."""
        self._busy[slot] = False
        self._last_used[slot] = self._clock
        self._clock += 1

    def clear(self) -> None:
        """Forget everything; every slot is idle and empty."""
        self.length[:] = 0
        self._busy[:] = False
        self._last_used[:] = -1
        self._waves[:] = -1

    def _common_prefix(self, token_ids: NDArray[np.int32]) -> NDArray[np.int64]:
        """How many leading ids each slot shares with `token_ids`, among its valid ones. [S]."""
        width = min(len(token_ids), int(self.length.max(initial=0)))
        if width == 0:
            return np.zeros_like(self.length)
        differs = self.tokens[:, :width] != token_ids[:width]
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
        return np.minimum(first, self.length)

    def _victim(self) -> int:
        """The idle slot that is empty or was used longest ago; lowest number first."""
        never = np.iinfo(np.int64).max
        return int(np.where(self._busy, never, self._last_used).argmin())

    def _occupy(self, placed: Placement, token_ids: NDArray[np.int32]) -> None:
        self.reserve(len(token_ids) + 1)
        self.tokens[placed.slot, : len(token_ids)] = token_ids
        self.length[placed.slot] = len(token_ids) - 1
        self._busy[placed.slot] = True
        self._waves[placed.slot] = placed.wave
