"""What a model's own loader copies where, found without copying: the plan of a load.

For a dense model without quantization `model.load_weights` only copies pieces of the tensors it is
given into pieces of parameters. Which ones depends on names and shapes alone, so one load with
tensors that hold nothing (on torch's device `meta`) tells them all. Whoever has the plan copies the
same pieces from later tensors without the loader.

A load that does anything else has no plan: one that writes by another operation, copies what is no
view of a tensor it was given, writes to what is no parameter, writes an element twice, leaves one
out, or fails. Tensors given to a loader are contiguous and on the model's device.

This file may import torch alone: the engines' servers, which may lack agentrl, get a copy of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .copy_tiling import TilingError, check_tiles

__all__ = [
    "Copy",
    "CopyPlan",
    "Fill",
    "NoPlanError",
    "Spec",
    "plan_copies",
    "spec_of",
    "storage_of",
]

aten = torch.ops.aten
CLONES = (aten._to_copy.default, aten.clone.default)
"""`.to(device)` of a tensor without values, which is on no device, and `.contiguous()`."""
FILLS = (aten.fill_.Scalar, aten.zero_.default)
LOADER_ERRORS = (
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    StopIteration,
    TypeError,
    ValueError,
)
"""What a loader may raise that cannot do with a tensor without values."""

Spec = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor that is given to a loader."""


class NoPlanError(Exception):
    """The load is not one that can be planned; says why in a clause."""


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """One piece of a given tensor, and the view of a parameter that it is copied to."""

    destination: torch.Tensor
    name: str
    stride: tuple[int, ...]
    offset: int
    """Stride and offset, in elements, of the piece inside the contiguous tensor `name`."""

    def source(self, tensor: torch.Tensor) -> torch.Tensor:
        """The piece of `tensor`, which has the planned shape."""
        start = tensor.storage_offset() + self.offset
        return tensor.as_strided(self.destination.shape, self.stride, start)


@dataclass(frozen=True, slots=True, eq=False)
class Fill:
    """A view of a parameter that every load sets to one number: the padding of a vocabulary."""

    destination: torch.Tensor
    value: float


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """Everything that loading tensors of these names and shapes writes."""

    specs: Mapping[str, Spec]
    copies: Mapping[str, tuple[Copy, ...]]
    """By the name of the tensor; those that the loader passes over have none."""
    fills: tuple[Fill, ...]
    layout: Mapping[str, object]

    @property
    def count(self) -> int:
        """How many copies there are."""
        return sum(len(copies) for copies in self.copies.values())

    def fits(self, model: torch.nn.Module) -> bool:
        """Whether the parameters are where they were when the plan was made."""
        return self.layout == _layout(model)

    def pieces(
        self, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> list[tuple[Copy, torch.Tensor]]:
        """Each copy out of `tensors`, all of them planned, with its source."""
        return [
            (copy, copy.source(tensor)) for name, tensor in tensors for copy in self.copies[name]
        ]

    def copy(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Carry out the copies of these tensors."""
        pieces = self.pieces(tensors)
        if pieces:
            destinations = [copy.destination for copy, _ in pieces]
            torch._foreach_copy_(destinations, [source for _, source in pieces])

    def fill(self) -> None:
        """Carry out the fills."""
        for fill in self.fills:
            fill.destination.fill_(fill.value)


def spec_of(tensor: torch.Tensor) -> Spec:
    """What a plan knows of a tensor before it comes."""
    return tensor.dtype, tuple(tensor.shape)


@torch.no_grad()
def plan_copies(model: torch.nn.Module, specs: Mapping[str, Spec]) -> CopyPlan:
    """Let `model.load_weights` load nothing, in the order of `specs`, and see what it would write.

    The model stays as it is.

    Raises:
        NoPlanError: the load is more than copies; see the module.
    """
    layout = _layout(model)
    recorder = _Recorder(model)
    put_back = _keep(model)
    try:
        with recorder:
            model.load_weights(recorder.give(specs))  # type: ignore[operator]
    except LOADER_ERRORS as error:
        failure = f"the loader failed without values ({error!r})"
        raise NoPlanError(recorder.problem or failure) from error
    finally:
        changed = put_back()
    if recorder.problem is not None:  # the loader went on after it
        raise NoPlanError(recorder.problem)
    if changed:
        raise NoPlanError("the loader replaces parameters or buffers")
    written = [copy.destination for copy in recorder.copies]
    written += [fill.destination for fill in recorder.fills]
    try:
        check_tiles(dict(model.named_parameters()), written)
    except TilingError as error:
        raise NoPlanError(str(error)) from error
    copies: dict[str, list[Copy]] = {name: [] for name in specs}
    for copy in recorder.copies:
        copies[copy.name].append(copy)
    by_name = {name: tuple(found) for name, found in copies.items()}
    return CopyPlan(dict(specs), by_name, tuple(recorder.fills), layout)


class _Recorder(TorchDispatchMode):
    """Notes copies and fills of parameters instead of carrying them out; allows no other write."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[Copy] = []
        self.fills: list[Fill] = []
        self.problem: str | None = None
        self._homes = {storage_of(parameter) for parameter in model.parameters()}
        self._given: dict[int, tuple[str, torch.Tensor]] = {}

    def give(self, specs: Mapping[str, Spec]) -> Iterable[tuple[str, torch.Tensor]]:
        """Tensors of these names and shapes without values, each in a storage of its own."""
        for name, (dtype, shape) in specs.items():
            tensor = torch.empty(shape, dtype=dtype, device="meta")
            self._given[storage_of(tensor)] = name, tensor
            yield name, tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.copy_.default:
            return self._copy(args[0], args[1])
        if func in FILLS:
            return self._fill(args[0], args[1] if len(args) > 1 else 0)
        if func in CLONES and self._keeps_values(args[0], kwargs):
            return args[0]  # nobody can tell, as nothing given is ever written to
        if func._schema.is_mutable:
            self._refuse(f"the loader calls {func}")
        return func(*args, **kwargs)

    def _copy(self, destination: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        self._check_home(destination)
        if storage_of(source) not in self._given:
            self._refuse("the loader copies what is no view of a tensor that it was given")
        name, given = self._given[storage_of(source)]
        if source.shape != destination.shape or source.dtype is not given.dtype:
            self._refuse(f"the loader changes the shape or the dtype of {name}")
        if destination.numel():
            view = destination.detach()
            offset = int(source.storage_offset())
            self.copies.append(Copy(view, name, source.stride(), offset))
        return destination

    def _fill(self, destination: torch.Tensor, value: float) -> torch.Tensor:
        self._check_home(destination)
        if destination.numel():
            self.fills.append(Fill(destination.detach(), value))
        return destination

    def _keeps_values(self, tensor: torch.Tensor, options: Mapping[str, Any]) -> bool:
        dtype = options.get("dtype") or tensor.dtype
        return storage_of(tensor) in self._given and dtype == tensor.dtype

    def _check_home(self, destination: torch.Tensor) -> None:
        if storage_of(destination) not in self._homes:
            self._refuse("the loader writes to what is no parameter")

    def _refuse(self, problem: str) -> None:
        self.problem = self.problem or problem
        raise RuntimeError(problem)


def _keep(model: torch.nn.Module) -> Callable[[], bool]:
    """Remember the tensors of the modules; the result puts them back, and says if it had to."""
    tables: list[dict[str, Any]] = [
        table for m in model.modules() for table in (m._parameters, m._buffers)
    ]
    kept = [(table, dict(table)) for table in tables]
    tensors = {id(t): t for _, held in kept for t in held.values() if t is not None}
    values = [(tensor, tensor.data, tensor.data_ptr()) for tensor in tensors.values()]

    def put_back() -> bool:
        changed = False
        for table, held in kept:
            if {k: id(v) for k, v in table.items()} != {k: id(v) for k, v in held.items()}:
                table.clear()
                table.update(held)
                changed = True
        for tensor, value, address in values:
            if tensor.data_ptr() != address or tensor.shape != value.shape:
                tensor.data = value
                changed = True
        return changed

    return put_back


def _layout(model: torch.nn.Module) -> dict[str, object]:
    return {
        name: (p.data_ptr(), p.dtype, tuple(p.shape), p.stride())
        for name, p in model.named_parameters()
    }


def storage_of(tensor: torch.Tensor) -> int:
    """Names the memory of a tensor as long as that lives."""
    name: int = tensor.untyped_storage()._cdata
    return name
