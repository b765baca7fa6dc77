"""Rows that hold several sequences one after another, so that little of them is padding.

For models whose layers cannot share prefixes but let sequences stand in one row: the positions
begin again with each, by which the model's own attention keeps them apart (see `sharing`).
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["fill_rows"]


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
