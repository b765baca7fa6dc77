"""Which engine takes a request: where its prefix is cached, unless that engine has too much to do.

Load is counted in outstanding tokens (prompt and most new ones). A rollout stays where it began,
since its history is cached there. Siblings share their prompt, so a group goes to one engine, until
that is ahead of the least loaded by more than `SIBLINGS` such requests and half the mean load.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

__all__ = ["Router"]

SIBLINGS = 16
REMEMBERED = 65536
"""How many rollouts and groups are remembered; the oldest are forgotten first."""

Slot = TypeVar("Slot")


class Router(Generic[Slot]):
    """Chooses among slots: engines, or the data-parallel replicas inside them."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = tuple(slots)
        self._load: dict[Slot, int] = dict.fromkeys(self.slots, 0)
        self._begun: dict[Slot, int] = dict.fromkeys(self.slots, 0)
        self._rollouts: OrderedDict[str, Slot] = OrderedDict()
        self._groups: OrderedDict[str, Slot] = OrderedDict()

    def outstanding(self, slot: Slot) -> int:
        """Tokens of the requests that `slot` has not answered."""
        return self._load[slot]

    def choose(self, usable: Sequence[Slot], rollout_id: str, group_id: str, tokens: int) -> Slot:
        """Pick one of `usable` (at least one) for a request of `tokens` tokens, and remember it."""
        slot = self._remembered(usable, rollout_id, group_id, tokens)
        if slot is None:
            # Equal loads are shared out in turn.
            slot = min(usable, key=lambda slot: (self._load[slot], self._begun[slot]))
        _remember(self._rollouts, rollout_id, slot)
        if self._groups.get(group_id) not in usable:
            _remember(self._groups, group_id, slot)
        return slot

    def begin(self, slot: Slot, tokens: int) -> None:
        """A request was sent to `slot`."""
        self._load[slot] += tokens
        self._begun[slot] += 1

    def end(self, slot: Slot, tokens: int) -> None:
        """A request of `slot` has ended, however it did."""
        self._load[slot] -= tokens

    def _remembered(
        self, usable: Sequence[Slot], rollout_id: str, group_id: str, tokens: int
    ) -> Slot | None:
        home = self._rollouts.get(rollout_id)
        if home is not None and home in usable:
            return home
        home = self._groups.get(group_id)
        if home is None or home not in usable:
            return None
        loads = [self._load[slot] for slot in usable]
        spread = max(SIBLINGS * tokens, sum(loads) / len(loads) / 2)
        return home if self._load[home] - min(loads) < spread else None


def _remember(memory: OrderedDict[str, Slot], key: str, slot: Slot) -> None:
    if key:
        memory[key] = slot
        memory.move_to_end(key)
        if len(memory) > REMEMBERED:
            memory.popitem(last=False)
