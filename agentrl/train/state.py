"""The learner's state on disk: one file for each rank, plain tensors and numbers only.

A file holds what the rank owns: its part of the float32 weights and of the optimizer's moments, the
schedule, and the states of the random generators. Saving waits for no other rank, so that a rank
that cannot write fails alone and says so.
"""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from agentrl.errors import UsageError

__all__ = ["load_rank", "random_state", "save_rank", "set_random_state", "write_tensors"]

_WEIGHTS, _OPTIMIZER = "fp32_flat_groups", "optimizer_state_dict"


def save_rank(
    folder: Path, engine: Any, scheduler: LRScheduler, rank: int, world_size: int
) -> None:
    """Write this rank's file into `folder`, which exists.

    Raises:
        OSError: it cannot be written.
    """
    zero = engine.optimizer.state_dict()
    write_tensors(
        _path(folder, rank),
        {
            "world_size": world_size,
            "weights": zero[_WEIGHTS],
            "optimizer": zero[_OPTIMIZER],
            "scheduler": scheduler.state_dict(),
            "random": random_state(),
        },
    )


def load_rank(
    folder: Path, engine: Any, scheduler: LRScheduler, rank: int, world_size: int
) -> None:
    """Take back what `save_rank` wrote; the parameters of the module follow. A collective.

    Raises:
        UsageError: there is no such file, it is broken, or it is of another number of ranks or of
            another model.
    """
    saved = _read(_path(folder, rank), world_size)
    zero = engine.optimizer.state_dict()
    if [w.shape for w in zero[_WEIGHTS]] != [w.shape for w in saved["weights"]]:
        raise UsageError(
            f"The checkpoint {folder} is of a model with other shapes: "
            "resume with the --model.path that it was trained with."
        )
    zero |= {_WEIGHTS: saved["weights"], _OPTIMIZER: saved["optimizer"]}
    engine.optimizer.checkpoint_event_prologue()
    engine.optimizer.load_state_dict({rank: zero})
    engine.optimizer.checkpoint_event_epilogue()
    scheduler.load_state_dict(saved["scheduler"])
    set_random_state(saved["random"])


def random_state() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's global generators, as plain values."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """Set the global generators to what `random_state` returned."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])


def write_tensors(path: Path, value: Any) -> None:
    """`torch.save`, except that a full disk is an `OSError` here as it is elsewhere."""
    with path.open("wb") as file:
        try:
            torch.save(value, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def _path(folder: Path, rank: int) -> Path:
    return folder / f"learner-rank-{rank:05d}.pt"


def _read(path: Path, world_size: int) -> dict[str, Any]:
    try:
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise UsageError(
            f"The learner's state {path} cannot be read: resume from another checkpoint, "
            "with as many ranks as it was saved with."
        ) from error
    if saved["world_size"] != world_size:
        raise UsageError(
            f"The checkpoint {path.parent} was saved by {saved['world_size']} ranks and this run "
            f"has {world_size}: resume with torchrun --nproc-per-node {saved['world_size']}."
        )
    return saved
