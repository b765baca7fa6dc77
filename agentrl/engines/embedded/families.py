"""Decoding rows that begin alike: what they share is read once for all of them.

With one new token for each row, attention is as slow as keys and values are read. Rows with a
common prefix form a family: their queries attend together to the prefix, as one slot holds it, and
each alone to what is its own; the two results of a row are merged by their log-sum-exp, exactly.

Legend: B rows, H key/value heads, G query heads of each, L positions, D head size, N tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Families", "Family", "attend_in_families", "find_families"]

CALL_TOKENS = 2048
"""Reading the keys and values of so many tokens costs about as much as a family's own calls."""

SHORT = 64
"""Where no row is longer, nothing can be saved that is worth looking for."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True)
class Family:
    """Rows of the batch whose slots hold the same first `prefix` tokens (0 for a row alone)."""

    rows: NDArray[np.int64]
    prefix: int


def find_families(tokens_BN: NDArray[np.int32], length_B: NDArray[np.int64]) -> list[Family]:
    """Put rows with a common prefix together, each row in one family.

    Returns:
        Families that are worth their calls together; none where reading every row for itself is
        cheaper.
    """
    if length_B.max() < SHORT:
        return []
    # In the order of their tokens, each row shares most with the one before it or after it.
    keys = [row[:length].tobytes() for row, length in zip(tokens_BN, length_B, strict=True)]
    order = sorted(range(len(keys)), key=keys.__getitem__)
    families: list[Family] = []
    members, prefix = [order[0]], int(length_B[order[0]])
    for row, shared in zip(order[1:], _shared(tokens_BN, length_B, order), strict=True):
        # Whoever shares little would cost the others more of their prefix than it saves.
        if 2 * shared > prefix:
            members.append(row)
            prefix = min(prefix, shared)
        else:
            families.append(_family(members, prefix))
            members, prefix = [row], int(length_B[row])
    families.append(_family(members, prefix))
    saved = sum((len(family.rows) - 1) * family.prefix for family in families)
    return families if saved > CALL_TOKENS * len(families) else []


def _family(rows: list[int], prefix: int) -> Family:
    return Family(np.array(sorted(rows)), prefix if len(rows) > 1 else 0)


def _shared(
    tokens_BN: NDArray[np.int32], length_B: NDArray[np.int64], order: list[int]
) -> list[int]:
    """How many tokens each row of `order` but the first has in common with the one before."""
    tokens, lengths = tokens_BN[order], length_B[order]
    limits = np.minimum(lengths[1:], lengths[:-1])
    differs = tokens[1:] != tokens[:-1]
    first = np.where(differs.any(axis=1), differs.argmax(axis=1), tokens.shape[1])
    shared: list[int] = np.minimum(first, limits).tolist()
    return shared


class Families:
    """The families of one decode step, with what each row sees of its own tokens.

    `slots_B` and `positions_B` (of the new token) are on the host.
    """

    def __init__(
        self,
        families: list[Family],
        slots_B: NDArray[np.int64],
        positions_B: NDArray[np.int64],
        dtype: torch.dtype,
    ) -> None:
        self.parts = []
        for family in families:
            positions = positions_B[family.rows]
            own = torch.arange(family.prefix, int(positions.max()) + 1)
            seen = own <= torch.from_numpy(positions)[:, None, None, None]
            mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)
            slots = torch.from_numpy(slots_B[family.rows])
            self.parts.append((torch.from_numpy(family.rows), slots, family.prefix, mask))


def attend_in_families(
    query: Tensor, keys: Tensor, values: Tensor, families: Families, scale: float
) -> Tensor:
    """Attend from query [B, H, G, D] over the slots' keys and values [S, H, L, D]; like `query`."""
    out = torch.empty_like(query)
    for rows, slots, prefix, mask in families.parts:
        end = prefix + mask.shape[-1]
        of_rows = query[rows]
        size, heads, groups, width = of_rows.shape
        k, v = (x[:, :, prefix:end].index_select(0, slots) for x in (keys, values))
        own, own_lse = _flash(
            of_rows, k, v, 0.0, False, attn_mask=mask.expand(-1, 1, groups, -1), scale=scale
        )
        if prefix:
            leader = int(slots[0])
            together = of_rows.transpose(0, 1).reshape(1, heads, size * groups, width)
            k, v = (x[leader : leader + 1, :, :prefix] for x in (keys, values))
            common, common_lse = _flash(together, k, v, 0.0, False, scale=scale)
            common = common.view(heads, size, groups, width).transpose(0, 1)
            common_lse = common_lse.view(heads, size, groups).transpose(0, 1)
            share = torch.sigmoid(common_lse - own_lse).unsqueeze(-1)
            own = torch.lerp(own.float(), common.float(), share).to(query.dtype)
        out[rows] = own
    return out
