"""How ZeRO-3 cuts parameters, as plain arithmetic, so that states fit another number of ranks.

A parameter of n elements is flattened and cut into parts of ceil(n / ranks), one for each rank; the
last ones are padded. A rank keeps its parts one after the other in flat tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["Sizes", "join_parts", "part_numel", "recut", "split_parts"]

Sizes = Sequence[tuple[str, int]]
"""Names of parameters and their numbers of elements, in the order in which they are kept."""


def part_numel(numel: int, ranks: int) -> int:
    """Elements of one rank's part, padding included."""
    return -(-numel // ranks)


def split_parts(flat_P: Tensor, sizes: Sizes, ranks: int) -> dict[str, Tensor]:
    """Views of a rank's flat tensor: its part of each parameter, by name."""
    lengths = [part_numel(numel, ranks) for _, numel in sizes]
    return dict(
        zip((name for name, _ in sizes), torch.split_with_sizes(flat_P, lengths), strict=True)
    )


def join_parts(part: Callable[[str, int], Tensor], sizes: Sizes) -> Tensor:
    """The flat tensor of a rank from its part of each parameter (name, elements)."""
    return torch.cat([part(name, numel) for name, numel in sizes])


def recut(
    old_part: Callable[[int], Tensor], numel: int, *, old_ranks: int, rank: int, ranks: int
) -> Tensor:
    """The part of `rank` of `ranks`, a new tensor padded with 0, from those of `old_ranks`.

    Args:
        old_part: gives the part of an old rank; only those that overlap are asked for.
        numel: elements of the parameter.
    """
    size, old_size = part_numel(numel, ranks), part_numel(numel, old_ranks)
    begin, end = min(rank * size, numel), min((rank + 1) * size, numel)
    pieces = []
    while begin < end:
        old_rank = begin // old_size
        stop = min(end, (old_rank + 1) * old_size)
        pieces.append(old_part(old_rank)[begin - old_rank * old_size : stop - old_rank * old_size])
        begin = stop
    kept = sum(piece.numel() for piece in pieces)
    like = pieces[0] if pieces else old_part(0)
    return torch.cat([*pieces, like.new_zeros(size - kept)])
