"""Runs inside SGLang: loads buckets out of shared memory, or copies them (see `in_place`).

SGLang calls a custom weight loader by its name for every bucket of an update, and once more
without any when all have come. A copy of this file and of those that it imports from beside it lies
on the server's PYTHONPATH (see `agentrl.engines.sglang.install_loader`). SGLang's own loader takes
each bucket by itself, so that one which no plan knows is simply loaded.
"""

from __future__ import annotations

import json
import logging
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .in_place import InPlaceUpdates, OtherWeightsError

__all__ = ["load"]

logger = logging.getLogger(__name__)

_updates: dict[torch.nn.Module, InPlaceUpdates] = {}
_begun: dict[torch.nn.Module, str] = {}
"""The last update of each model."""
_parts: dict[torch.nn.Module, int] = {}
"""How many buckets of it have been loaded."""
_opened: deque[torch.Tensor] = deque(maxlen=2)
"""The memories that take turns stay open from one bucket to the next."""


def load(model: torch.nn.Module, buckets: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Load buckets, each a JSON of what lies in it and the bytes; without any, end the update.

    The JSON has `update`, which tells updates apart, `specs`, a list of name, dtype and shape, and
    `parts`: after so many buckets the update has ended; null if it is ended by a call without any.
    The buckets of an update may come in any order.
    """
    updates = _updates.setdefault(model, InPlaceUpdates(model, logger.info))
    for content, flat in buckets:
        facts = json.loads(content)
        _opened.append(flat)
        if _begun.get(model) != facts["update"]:
            _begun[model], _parts[model] = facts["update"], 0
            updates.begin()
        _load_one(model, updates, list(_tensors(facts["specs"], flat)))
        if flat.device.type != "cpu":
            torch.accelerator.synchronize()  # the learner writes there again after the answer
        _parts[model] += 1
        if _parts[model] == facts["parts"]:
            _end(updates)
    if not buckets:
        _end(updates)


def _load_one(
    model: torch.nn.Module, updates: InPlaceUpdates, tensors: list[tuple[str, torch.Tensor]]
) -> None:
    if updates.copies:
        try:
            updates.copy(tensors)
            return
        except OtherWeightsError as error:
            logger.info("weights are loaded again: %s", error)
    updates.note(tensors)
    with updates.loading():
        model.load_weights(tensors)  # type: ignore[operator]


def _end(updates: InPlaceUpdates) -> None:
    if not updates.copies:
        updates.loaded()
        return
    try:
        updates.copied()
    except OtherWeightsError as error:
        logger.info("weights are loaded again from the next update on: %s", error)


def _tensors(
    specs: list[tuple[str, str, list[int]]], flat: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    start = 0
    for name, dtype_name, shape in specs:
        dtype: torch.dtype = getattr(torch, dtype_name)
        end = start + torch.Size(shape).numel() * dtype.itemsize
        yield name, flat[start:end].view(dtype).view(shape)
        start = end


def _let_kernels_end_before_pauses() -> None:
    """Have SGLang synchronize before it takes memory away (0.5.17 and 0.5.23 do so after).

    When a request ends, a kernel still copies its row of the cache's table, for which nothing
    waits. Where other processes keep the GPU busy it may run when the table is gone, which ends the
    server (cudaErrorIllegalAddress).
    """
    from sglang.srt.utils import (  # type: ignore[import-not-found]
        torch_memory_saver_adapter as adapters,
    )

    adapter = adapters._TorchMemorySaverAdapterReal
    pause = adapter.pause

    def pause_later(self: Any, tag: str) -> None:
        torch.accelerator.synchronize()
        pause(self, tag)

    adapter.pause = pause_later


if "sglang" in sys.modules:
    _let_kernels_end_before_pauses()
