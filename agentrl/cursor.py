"""In which order examples are drawn: as groups, epoch after epoch.

Which examples a step samples depends on the seed and on how many groups were drawn before, never
on timing, and survives a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from agentrl.data import Examples
from agentrl.errors import UsageError
from agentrl.executors.groups import GroupRequest

__all__ = ["ExampleCursor", "all_groups"]


def all_groups(examples: Examples, n_samples: int, *, prefix: str) -> list[GroupRequest]:
    """Every example once, in order, as an evaluation samples them."""
    return [
        GroupRequest(f"{prefix}{index:08d}", *examples[index], n_samples)
        for index in range(len(examples))
    ]


class ExampleCursor:
    """Draws groups epoch after epoch, each epoch in an order of its own.

    A batch that reaches the end of an epoch goes on in the next one, so that no tail is lost.
    """

    def __init__(self, examples: Examples, *, seed: int, shuffle: bool = True) -> None:
        self._examples = examples
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._drawn = 0
        self._order = self._make_order()

    @property
    def epoch(self) -> int:
        """How many whole passes over the data were drawn."""
        return self._epoch

    def next_groups(self, n_groups: int, n_samples: int) -> list[GroupRequest]:
        """Draw `n_groups` groups. Their ids count all groups ever drawn and sort in this order."""
        groups = []
        for _ in range(n_groups):
            if self._position == len(self._examples):
                self._epoch += 1
                self._position = 0
                self._order = self._make_order()
            example_id, example = self._examples[int(self._order[self._position])]
            groups.append(GroupRequest(f"{self._drawn:08d}", example_id, example, n_samples))
            self._position += 1
            self._drawn += 1
        return groups

    def state_dict(self) -> dict[str, int]:
        """The position, and what it is a position in."""
        return {
            "size": len(self._examples),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch": self._epoch,
            "position": self._position,
            "drawn": self._drawn,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
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
        self._epoch = state["epoch"]
        self._position = state["position"]
        self._drawn = state["drawn"]
        self._order = self._make_order()

    def _make_order(self) -> NDArray[np.int64]:
        size = len(self._examples)
        if not self._shuffle:
            return np.arange(size)
        return np.random.default_rng([self._seed % 2**32, self._epoch]).permutation(size)
