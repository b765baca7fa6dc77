"""Cuts a batch into micro-batches that are computed as token tries.

Samples are taken in depth-first order, where a micro-batch is a run of neighbours: its cost is that
of its first sample and of what each further one does not share with the one before. Every cut
repeats the prefix that its two neighbours share, so that cuts go where this is shortest.

One rank gets as few micro-batches as fit. Several get equally many, of about equal cost: the
pairs of tokens that attend to each other, and the layers' work of each token in such pairs.

A sample that is longer than a micro-batch goes through in several passes (`trie_chunks`), together
with neighbours of its kind that share more than a micro-batch with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentrl.train.batch import Sample
from agentrl.train.microbatch import MicroBatch, same_rounds
from agentrl.train.trie import prefix_order

__all__ = ["plan_tries"]

SLACK = 1.1
"""How much costlier than necessary the costliest micro-batch may be for the sake of better cuts."""

Ints = NDArray[np.int64]


def plan_tries(
    samples: Sequence[Sample],
    *,
    world_size: int,
    max_tokens: int,
    vocab_size: int,
    token_cost: int,
) -> list[list[MicroBatch]]:
    """Cut samples into tries and deal them out to ranks, in passes of at most `max_tokens` nodes.

    Args:
        samples: in any order; the plan names them by index. The same ones give the same plan.
        world_size: number of ranks.
        max_tokens: most computed tokens of one pass.
        vocab_size: size of a row of logits; it decides the chunks of the head.
        token_cost: work of all but attention for one token, in pairs of attending tokens.

    Returns:
        For each rank a list of micro-batches, all lists equally long, each in as many passes as
        the others' at its place; empty ones fill up.
    """
    if not samples:
        return [[] for _ in range(world_size)]
    order, shared = prefix_order(samples)
    lengths = np.array([samples[i].num_inputs for i in order], dtype=np.int64)
    run = _Run(lengths, shared, token_cost)
    fewest = run.fewest(run.furthest(max_tokens))
    count = -(-fewest // world_size) * world_size
    if world_size == 1:
        bounds = run.cut(run.furthest(max_tokens), count)
    else:
        bounds = run.cut(run.furthest(max_tokens, run.least_cost(max_tokens, count)), count)
    pieces = [
        _Piece(run.cost(a, b), run.nodes(a, b), [order[i] for i in range(a, b)]) for a, b in bounds
    ]
    rounds = _deal(pieces, world_size)
    return same_rounds(
        [[piece.samples for piece in dealt] for dealt in rounds],
        samples,
        vocab_size=vocab_size,
        as_trie=True,
        ranks=world_size,
        chunks=[max(1, *(-(-piece.nodes // max_tokens) for piece in dealt)) for dealt in rounds],
    )


class _Piece(NamedTuple):
    """A micro-batch to be: its work, its nodes, its samples by index."""

    cost: int = 0
    nodes: int = 0
    samples: Sequence[int] = ()


class _Run:
    """Samples in depth-first order; pieces of it are named by where they start and end."""

    def __init__(self, lengths: Ints, shared: Ints, token_cost: int) -> None:
        self.shared = shared
        self._token_cost = token_cost
        self._tokens = np.concatenate([[0], np.cumsum(lengths - shared)])
        self._shared_cost = self._path_cost(shared)
        self._singles = self._path_cost(lengths)
        self._costs = np.concatenate([[0], np.cumsum(self._singles - self._shared_cost)])

    def cost(self, start: int, end: int) -> int:
        """What the trie of samples start .. end costs."""
        return int(self._shared_cost[start] + self._costs[end] - self._costs[start])

    def nodes(self, start: int, end: int) -> int:
        """How many nodes the trie of samples start .. end has."""
        return int(self.shared[start] + self._tokens[end] - self._tokens[start])

    def furthest(self, max_tokens: int, max_cost: int | None = None) -> Ints:
        """For each start, the furthest end of a piece within both limits.

        One sample always is, and so are those that would compute more than a micro-batch again.
        """
        ends = _reach(self._tokens, max_tokens - self.shared)
        if max_cost is not None:
            ends = np.minimum(ends, _reach(self._costs, max_cost - self._shared_cost))
        bounds = np.append(np.flatnonzero(self.shared < max_tokens), len(ends))
        after = np.arange(len(ends)) + 1
        together: Ints = bounds[np.searchsorted(bounds, after)]
        return np.maximum(ends, together)

    def fewest(self, furthest: Ints) -> int:
        """How few pieces will do."""
        pieces = start = 0
        while start < len(furthest):
            start = int(furthest[start])
            pieces += 1
        return pieces

    def least_cost(self, max_tokens: int, count: int) -> int:
        """Limit of cost, a little over the least under which `count` pieces will do."""
        low, high = int(self._singles.max()), max(self.cost(0, len(self.shared)), 1)
        while low < high:
            middle = (low + high) // 2
            if self.fewest(self.furthest(max_tokens, middle)) <= count:
                high = middle
            else:
                low = middle + 1
        return int(SLACK * high)

    def cut(self, furthest: Ints, count: int) -> list[tuple[int, int]]:
        """Cut into at most `count` pieces, each time where the least prefix is repeated."""
        size = len(furthest)
        needed = np.zeros(size + 1, dtype=np.int64)
        for start in range(size - 1, -1, -1):
            needed[start] = 1 + needed[furthest[start]]
        pieces: list[tuple[int, int]] = []
        start = 0
        while start < size:
            end = int(furthest[start])
            if end < size:
                ends = np.arange(start + 1, end + 1)
                ends = ends[needed[ends] < count - len(pieces)]
                repeated = self.shared[ends]
                end = int(ends[repeated == repeated.min()][-1])
            pieces.append((start, end))
            start = end
        return pieces

    def _path_cost(self, lengths: Ints) -> Ints:
        return lengths * (lengths + 1) // 2 + self._token_cost * lengths


def _reach(sums: Ints, room: Ints) -> Ints:
    """For each start, the last end at which `sums` has grown by no more than `room[start]`."""
    return np.searchsorted(sums, sums[:-1] + room, side="right") - 1


def _deal(pieces: Sequence[_Piece], world_size: int) -> list[list[_Piece]]:
    """Rounds of one piece for each rank: alike in a round, and alike over all rounds.

    In every round the rank with the least work so far gets the costliest piece.
    """
    ordered = sorted(pieces, key=lambda piece: -piece.cost)
    loads = [0] * world_size
    rounds = []
    for first in range(0, len(ordered), world_size):
        dealt = [_Piece()] * world_size
        ranks = sorted(range(world_size), key=loads.__getitem__)
        for piece, rank in zip(ordered[first : first + world_size], ranks, strict=False):
            dealt[rank] = piece
            loads[rank] += piece.cost
        rounds.append(dealt)
    return rounds
