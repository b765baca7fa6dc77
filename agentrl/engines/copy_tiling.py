"""Whether views tile parameters: every element of every parameter lies in exactly one view.

Counted in runs of memory without gaps, so that a view of a billion elements costs no more than a
small one. This file may import torch alone, as `copy_plan.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch

__all__ = ["TilingError", "check_tiles"]

MAX_RUNS = 1 << 22
"""Runs that one view may have; the pieces that loaders write have one, or one for each row."""


class TilingError(Exception):
    """The views are no tiles; says why in a clause."""


def check_tiles(parameters: Mapping[str, torch.Tensor], views: Iterable[torch.Tensor]) -> None:
    """See the module. Parameters may share memory, which is then to be tiled once.

    Raises:
        TilingError: an element lies in two views, or in none.
    """
    wanted: dict[int, list[torch.Tensor]] = defaultdict(list)
    tiled: dict[int, list[torch.Tensor]] = defaultdict(list)
    names: dict[int, str] = {}
    for name, parameter in parameters.items():
        home = parameter.untyped_storage()._cdata
        names.setdefault(home, name)
        wanted[home].append(_runs(parameter))
    for view in views:
        tiled[view.untyped_storage()._cdata].append(_runs(view))
    for home, name in names.items():
        tiles, overlap = _merge(tiled[home])
        if overlap:
            raise TilingError(f"the loader writes a part of {name} twice")
        if not torch.equal(tiles, _merge(wanted[home])[0]):
            raise TilingError(f"the loader does not write all of {name}")


def _runs(view: torch.Tensor) -> torch.Tensor:
    """Beginnings and ends, in bytes of the storage, of the gapless runs of a view; shape (n, 2)."""
    dims = sorted(zip(view.stride(), view.shape, strict=True), reverse=True)
    dims = [(stride, size) for stride, size in dims if size != 1]
    length = 1
    while dims and dims[-1][0] == length:
        length *= dims.pop()[1]
    starts = torch.tensor([view.storage_offset()], device="cpu")
    if view.numel() > MAX_RUNS * length:
        raise TilingError("the loader writes in too many pieces")
    for stride, size in dims:
        steps = torch.arange(size, device="cpu") * stride
        starts = (starts[:, None] + steps).flatten()
    size = view.element_size()
    return torch.stack([starts * size, (starts + length) * size], dim=1)


def _merge(runs: list[torch.Tensor]) -> tuple[torch.Tensor, bool]:
    """The fewest runs that hold the same bytes, in order; and whether any two overlap."""
    every = torch.cat([torch.empty((0, 2), dtype=torch.int64, device="cpu"), *runs])
    every = every[every[:, 1] > every[:, 0]]
    every = every[every[:, 0].argsort()]
    starts, ends = every[:, 0], every[:, 1].cummax(0).values
    if len(every) == 0:
        return every, False
    gaps = starts[1:] > ends[:-1]
    yes = torch.ones(1, dtype=torch.bool, device="cpu")
    merged = torch.stack([starts[torch.cat([yes, gaps])], ends[torch.cat([gaps, yes])]], dim=1)
    return merged, bool((starts[1:] < ends[:-1]).any())
