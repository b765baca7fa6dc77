"""Decoding rows that begin alike: what they share is read once for all of them.

With one new token for each row, attention is as slow as keys and values are read. Rows with a
common prefix form a family: their queries attend together to the prefix, as one slot holds it, and
each alone to what is its own; the two results of a row are merged by their log-sum-exp, exactly.

Legend: B rows, H key/value heads, G query heads of each, L positions, D head size, N tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Families", "Family", "attend_in_families", "find_families"]

CALL_TOKENS = 2048
"""Reading the keys and values of so many tokens costs about as much as a family's own calls."""

NEAR = 16
"""Prefixes whose lengths differ by less are read up to the end of the shorter one."""

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


Rows = slice | Tensor
"""Picks rows or slots: a slice where they are evenly spaced, which needs no copy."""


@dataclass(frozen=True, slots=True)
class _Cohort:
    """Families whose prefixes end almost together, computed in the same calls.

    Each row's own tokens begin at `prefix`, the end of the shortest of them; `mask_BL` says which
    of those it sees. `common` holds, for families of one size after the other, the slots that
    their prefixes are read from and that size.
    """

    rows: Rows
    slots: Rows
    prefix: int
    mask_BL: Tensor
    common: list[tuple[Rows, int]]


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
        self.cohorts = [
            _cohort(members, slots_B, positions_B, dtype) for members in _near(families)
        ]


def _near(families: list[Family]) -> Iterator[list[Family]]:
    """Put families together whose prefixes differ by little; rows without one come first."""
    members: list[Family] = []
    for family in sorted(families, key=_order):
        first = members[0].prefix if members else 0
        if members and (family.prefix >= first + NEAR or (first == 0) != (family.prefix == 0)):
            yield members
            members = []
        members.append(family)
    yield members


def _order(family: Family) -> tuple[int, int, int]:
    return family.prefix, len(family.rows), int(family.rows[0])


def _cohort(
    families: list[Family],
    slots_B: NDArray[np.int64],
    positions_B: NDArray[np.int64],
    dtype: torch.dtype,
) -> _Cohort:
    prefix = families[0].prefix
    by_size: dict[int, list[Family]] = {}
    for family in families:
        by_size.setdefault(len(family.rows), []).append(family)
    ordered = [family.rows for same in by_size.values() for family in same]
    rows = np.concatenate(ordered)
    positions = positions_B[rows]
    own = torch.arange(prefix, int(positions.max()) + 1)
    seen = own <= torch.from_numpy(positions)[:, None]
    leaders = [np.array([slots_B[f.rows[0]] for f in same]) for same in by_size.values()]
    return _Cohort(
        rows=_evenly(rows),
        slots=_evenly(slots_B[rows]),
        prefix=prefix,
        mask_BL=torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf),
        common=[(_evenly(of), size) for of, size in zip(leaders, by_size, strict=True)]
        if prefix
        else [],
    )


def _evenly(index: NDArray[np.int64]) -> Rows:
    step = int(index[1] - index[0]) if len(index) > 1 else 1
    if step > 0 and (np.diff(index) == step).all():
        return slice(int(index[0]), int(index[-1]) + 1, step)
    return torch.from_numpy(index)


def _take(x: Tensor, rows: Rows) -> Tensor:
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def attend_in_families(
    query: Tensor, keys: Tensor, values: Tensor, families: Families, scale: float
) -> Tensor:
    """Attend from query [B, H, G, D] over the slots' keys and values [S, H, L, D]; like `query`."""
    out = torch.empty_like(query)
    for cohort in families.cohorts:
        of_rows = _take(query, cohort.rows)
        mask = cohort.mask_BL[:, None, None].expand(-1, 1, query.shape[2], -1)
        end = cohort.prefix + mask.shape[-1]
        k, v = (_take(x[:, :, cohort.prefix : end], cohort.slots) for x in (keys, values))
        own, own_lse = _flash(of_rows, k, v, 0.0, False, attn_mask=mask, scale=scale)
        start = 0
        for leaders, size in cohort.common:
            k, v = (_take(x[:, :, : cohort.prefix], leaders) for x in (keys, values))
            part = slice(start, start + len(k) * size)
            common, common_lse = _attend_together(of_rows[part], k, v, scale)
            share = torch.sigmoid(common_lse - own_lse[part]).unsqueeze(-1)
            own[part] = torch.lerp(own[part].float(), common.float(), share).to(query.dtype)
            start = part.stop
        out[cohort.rows] = own
    return out


def _attend_together(query: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend from the rows [F * size, H, G, D] of F families to their prefixes [F, H, L, D].

    Returns the result, like `query`, and its log-sum-exp [F * size, H, G].
    """
    rows, heads, groups, width = query.shape
    families = len(k)
    size = rows // families
    together = query.view(families, size, heads, groups, width).transpose(1, 2)
    out, lse = _flash(
        together.reshape(families, heads, size * groups, width), k, v, 0.0, False, scale=scale
    )
    out = out.reshape(families, heads, size, groups, width).transpose(1, 2)
    lse = lse.reshape(families, heads, size, groups).transpose(1, 2)
    return out.reshape(query.shape), lse.reshape(rows, heads, groups)
