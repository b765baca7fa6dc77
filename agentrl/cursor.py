"""In which order examples are drawn: as groups, epoch after epoch.

Which examples a step samples depends on the seed and on how many groups were drawn before, never
on timing, and survives a checkpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.data import Examples
from agentrl.errors import UsageError
from agentrl.executors.groups import GroupRequest

__all__ = ["ExampleCursor", "all_groups"]

KEPT_ORDERS = 2
"""Epochs whose order is kept: groups that are drawn again can be of the one before."""


def all_groups(examples: Examples, n_samples: int, *, prefix: str) -> list[GroupRequest]:
    """Every example once, in order, as an evaluation samples them."""
    return [
        GroupRequest(f"{prefix}{index:08d}", *examples[index], n_samples)
        for index in range(len(examples))
    ]


class ExampleCursor:
    """Draws groups epoch after epoch, each epoch in an order of its own.

    A batch that reaches the end of an epoch goes on in the next one, so that no tail is lost. A
    group is known by its number, of all that are drawn in a run: its example follows from that.
    """

    def __init__(self, examples: Examples, *, seed: int, shuffle: bool = True) -> None:
        self._examples = examples
        self._seed = seed
        self._shuffle = shuffle
        self._drawn = 0
        self._again: deque[int] = deque()
        self._orders: dict[int, NDArray[np.int64]] = {}

    @property
    def epoch(self) -> int:
        """How many whole passes over the data were drawn."""
        return max(self._drawn - 1, 0) // len(self._examples)

    def next_groups(self, n_groups: int, n_samples: int) -> list[GroupRequest]:
        """Draw `n_groups` groups. Their ids count all groups ever drawn and sort in this order."""
        return [self._request(self._next_number(), n_samples) for _ in range(n_groups)]

    def state_dict(self, again: Iterable[str] = ()) -> dict[str, Any]:
        """The position, and what it is a position in.

        Args:
            again: ids of groups that were drawn but not used: they are drawn first after a restart.
        """
        return {
            "size": len(self._examples),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "drawn": self._drawn,
            "again": sorted({*self._again, *map(int, again)}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position.

        Raises:
            UsageError: the data, the seed or the shuffling are not those of the saved position.
        """
        own = self.state_dict()
        for key, flag in (
            ("size", "data.path"),
            ("seed", "train.seed"),
            ("shuffle", "data.shuffle"),
        ):
            if state[key] != own[key]:
                raise UsageError(
                    f"cannot resume: the {key} of the data was {state[key]} and is {own[key]} now; "
                    f"set {flag} (and the rest of [data]) as it was, or start a new run"
                )
        self._drawn = state["drawn"]
        self._again = deque(state["again"])

    def _next_number(self) -> int:
        if self._again:
            return self._again.popleft()
        self._drawn += 1
        return self._drawn - 1

    def _request(self, number: int, n_samples: int) -> GroupRequest:
        epoch, position = divmod(number, len(self._examples))
        example_id, example = self._examples[int(self._order(epoch)[position])]
        return GroupRequest(f"{number:08d}", example_id, example, n_samples)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._orders:
            if len(self._orders) == KEPT_ORDERS:
                del self._orders[min(self._orders)]
            self._orders[epoch] = self._make_order(epoch)
        return self._orders[epoch]

    def _make_order(self, epoch: int) -> NDArray[np.int64]:
        size = len(self._examples)
        if not self._shuffle:
            return np.arange(size)
        return np.random.default_rng([self._seed % 2**32, epoch]).permutation(size)
