"""The learner's state on disk: one file for each rank, plain tensors and numbers only.

A file holds what the rank owns: its part of the float32 weights and of the optimizer's moments, by
the names of the parameters, and the states of the random generators. Saving waits for
no other rank, so that a rank that cannot write fails alone and says so. Loading cuts the parts
anew where there are now more or fewer ranks.
"""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.errors import UsageError
from agentrl.train.partition import Sizes, join_parts, recut, split_parts
from agentrl.train.zero import make_whole

__all__ = ["load_rank", "random_state", "save_rank", "set_random_state", "write_tensors"]

_WEIGHTS, _OPTIMIZER = "fp32_flat_groups", "optimizer_state_dict"


def save_rank(
    folder: Path,
    engine: Any,
    optimizer_steps: int,
    rank: int,
    world_size: int,
    name: str = "learner",
) -> None:
    """Write this rank's file of the engine that `name` names into `folder`, which exists.

    Raises:
        OSError: it cannot be written.
    """
    zero, sizes = engine.optimizer.state_dict(), _sizes(engine)
    parts: dict[str, dict[str, Tensor]] = {}
    scalars: dict[str, Any] = {}
    for group, flat in zip(sizes, zero[_WEIGHTS], strict=True):
        parts.setdefault("weights", {}).update(split_parts(flat.detach(), group, world_size))
    for group, state in zip(sizes, _states(engine, zero), strict=True):
        for key, value in state.items():
            if _is_scalar(value):
                scalars[key] = value
            else:
                parts.setdefault(key, {}).update(split_parts(value, group, world_size))
    write_tensors(
        _path(folder, name, rank),
        {
            "world_size": world_size,
            "numels": {name: numel for group in sizes for name, numel in group},
            "parts": parts,
            "scalars": scalars,
            "groups": [_settings(group) for group in zero[_OPTIMIZER]["param_groups"]],
            "optimizer_steps": optimizer_steps,
            "random": random_state(),
        },
    )


def load_rank(folder: Path, engine: Any, rank: int, world_size: int, name: str = "learner") -> int:
    """Take back what `save_rank` wrote, on as many ranks as there are now; the parameters of the
    module follow. A collective.

    Returns:
        The number of optimizer steps that it was saved with.

    Raises:
        UsageError: there is no such file, one is broken, or they are of another model.
    """
    saved, sizes = _SavedState(folder, name), _sizes(engine)
    mine = saved.file(rank % saved.world_size)
    if mine["numels"] != {name: numel for group in sizes for name, numel in group}:
        raise UsageError(
            f"The checkpoint {folder} is of a model with other shapes: "
            "resume with the --model.path, --model.lora, --algo.value.model and "
            "--algo.advantage.estimator that it was trained with."
        )
    zero = engine.optimizer.state_dict()
    flats = {
        kind: [saved.flat(kind, group, rank, world_size) for group in sizes]
        for kind in mine["parts"]
    }
    weights = flats.pop("weights")
    states = [
        # Each counts its own steps, and the optimizer would take a tensor as it is.
        {key: values[i] for key, values in flats.items()} | copy.deepcopy(mine["scalars"])
        for i in range(len(sizes))
    ]
    own = zero[_OPTIMIZER]["param_groups"]
    optimizer = {
        "state": {index: states[i] for i, index in enumerate(_indices(engine)) if states[i]},
        "param_groups": [
            old | {"params": group["params"]}
            for old, group in zip(mine["groups"], own, strict=True)
        ],
    }
    zero |= {_WEIGHTS: weights, _OPTIMIZER: optimizer}
    engine.optimizer.checkpoint_event_prologue()
    engine.optimizer.load_state_dict({rank: zero})
    engine.optimizer.checkpoint_event_epilogue()
    make_whole(engine)
    set_random_state(mine["random"])
    steps: int = mine["optimizer_steps"]
    return steps


def _sizes(engine: Any) -> list[Sizes]:
    """What each flat tensor of the engine is made of."""
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    return [
        [(names[id(parameter)], parameter.ds_numel) for parameter in group]
        for group in engine.optimizer.fp16_groups
    ]


def _indices(engine: Any) -> list[int]:
    """By which number the optimizer's state dictionary knows each flat tensor."""
    owners = engine.optimizer.sub_group_to_group_id
    order = sorted(range(len(owners)), key=lambda i: owners[i])
    return [order.index(i) for i in range(len(owners))]


def _states(engine: Any, zero: dict[str, Any]) -> list[dict[str, Any]]:
    """The optimizer's state of each flat tensor; empty before the first step."""
    states = zero[_OPTIMIZER]["state"]
    return [states.get(index, {}) for index in _indices(engine)]


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.ndim == 0


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


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
    for device, generator in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(generator, device)


def write_tensors(path: Path, value: Any) -> None:
    """`torch.save`, except that a full disk is an `OSError` here as it is elsewhere."""
    with path.open("wb") as file:
        try:
            torch.save(value, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def _path(folder: Path, name: str, rank: int) -> Path:
    return folder / f"{name}-rank-{rank:05d}.pt"


class _SavedState:
    """The files of a checkpoint. Each is mapped when it is first needed, not read."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._files: dict[int, dict[str, Any]] = {}
        self.world_size: int = self.file(0)["world_size"]

    def file(self, rank: int) -> dict[str, Any]:
        """What `rank` had saved."""
        if rank not in self._files:
            path = _path(self._folder, self._name, rank)
            try:
                self._files[rank] = torch.load(
                    path, map_location="cpu", weights_only=True, mmap=True
                )
            except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
                raise UsageError(
                    f"The learner's state {path} cannot be read: resume from another checkpoint."
                ) from error
        return self._files[rank]

    def flat(self, kind: str, sizes: Sizes, rank: int, ranks: int) -> Tensor:
        """The flat tensor of one of `ranks`, in the order of `sizes`."""

        def part(name: str, numel: int) -> Tensor:
            return recut(
                lambda old_rank: self.file(old_rank)["parts"][kind][name],
                numel,
                old_ranks=self.world_size,
                rank=rank,
                ranks=ranks,
            )

        return join_parts(part, sizes)
