"""Plans micro-batches of whole sequences in rows, one in each or, packed, several.

A packed row holds sequences one after another, so that little of it is padding: for models whose
layers cannot share prefixes but let sequences stand in one row, where the positions begin again
with each and the model's own attention keeps them apart (see `sharing`). A plan is a pure function
of the samples: the same batch is always cut the same way.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from agentrl.errors import UsageError
from agentrl.train.batch import Sample
from agentrl.train.microbatch import MicroBatch, same_rounds

__all__ = ["fill_rows", "plan_rows"]


def plan_rows(
    samples: Sequence[Sample],
    *,
    world_size: int,
    max_tokens: int,
    vocab_size: int,
    packed: bool = False,
) -> list[list[MicroBatch]]:
    """Spread rows over ranks by tokens, then cut each rank's share by padded length.

    Args:
        samples: in any order; the plan names them by index.
        world_size: number of ranks.
        max_tokens: most padded inputs of one micro-batch.
        vocab_size: size of a row of logits; it decides the chunks of the head.
        packed: rows may hold several samples.

    Returns:
        For each rank a list of micro-batches, all lists equally long.

    Raises:
        UsageError: a sample alone is longer than `max_tokens`.
    """
    _check_longest(samples, max_tokens)
    lengths = [sample.num_inputs for sample in samples]
    rows = fill_rows(lengths) if packed else [[index] for index in range(len(samples))]
    sizes = [sum(lengths[index] for index in row) for row in rows]
    cuts = [_cut(share, sizes, max_tokens) for share in _balance(sizes, world_size)]
    depth = max(map(len, cuts))
    cuts = [[*cut, *[[]] * (depth - len(cut))] for cut in cuts]
    dealt = [[[rows[place] for place in cut] for cut in own_cuts] for own_cuts in cuts]
    rounds = [[list(chain(*own)) for own in same_step] for same_step in zip(*dealt, strict=True)]
    plan = same_rounds(rounds, samples, vocab_size=vocab_size, as_trie=False, ranks=world_size)
    if not packed:
        return plan
    return [
        [replace(each, row_sizes=tuple(map(len, own))) for each, own in zip(*pair, strict=True)]
        for pair in zip(plan, dealt, strict=True)
    ]


def _check_longest(samples: Sequence[Sample], max_tokens: int) -> None:
    """Raise `UsageError` where a sample alone is longer than `max_tokens`."""
    longest = max((sample.num_inputs for sample in samples), default=0)
    if longest > max_tokens:
        raise UsageError(
            f"A sequence of {longest + 1} tokens does not fit train.max_tokens_per_gpu "
            f"({max_tokens}): raise it, or lower rollout.max_tokens."
        )


def fill_rows(lengths: Sequence[int]) -> list[list[int]]:
    """Put sequences into rows, each into the first with room for it, longest first.

    No row is longer than the longest sequence: attention under a mask costs the square of a row.

    Returns:
        For each row the indices of its sequences.
    """
    width = max(lengths, default=0)
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        place = next((row for row, left in enumerate(room) if left >= length), None)
        if place is None:
            place = len(rows)
            rows.append([])
            room.append(width)
        rows[place].append(index)
        room[place] -= length
    return rows


def _balance(costs: Sequence[int], world_size: int) -> list[list[int]]:
    """Give the longest remaining row to the rank with the fewest tokens so far."""
    shares: list[list[int]] = [[] for _ in range(world_size)]
    loads = [(0, rank) for rank in range(world_size)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(index)
        heapq.heappush(loads, (load + costs[index], rank))
    return shares


def _cut(share: Sequence[int], sizes: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut rows, longest first, into runs whose padded size is at most `max_tokens`."""
    cuts: list[list[int]] = []
    width = 0
    for row in share:
        if not cuts or (len(cuts[-1]) + 1) * width > max_tokens:
            cuts.append([])
            width = sizes[row]
        cuts[-1].append(row)
    return cuts
