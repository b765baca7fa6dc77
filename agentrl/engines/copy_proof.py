"""The proof that a plan of copies does all that a load does, from one load by the engine's own way.

It watches that load from its beginning until the engine has finished with it, and shows that
(1) afterwards each destination of the plan holds, byte for byte, its piece of the tensor that was
given, in the parameter's dtype, or the number it is filled with: since the destinations tile all
parameters, every parameter is what the copies would make it;
(2) the parameters lie where they lay before;
(3) nothing was computed from the weights on the way: the tensors given, the parameters, and
whatever was copied from them were only viewed and copied, so that no scale, packed form or other
value outside the parameters depends on them. Kernels that are launched past torch's dispatcher are
not seen here; what they write to parameters is, by (1).

Bytes are compared by sums of 64 bits with random odd weights: two different pieces agree with a
probability near 2**-63. This file may import torch alone, as `copy_plan.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .copy_plan import FILLS, Copy, CopyPlan, storage_of

__all__ = ["CopyProof"]

aten = torch.ops.aten
CHUNK = 1 << 22
"""Elements that are summed at once: a few times 32 MiB beside the weights."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class CopyProof:
    """Taken during one load; `failure` then says what speaks against the plan."""

    def __init__(self, plan: CopyPlan, model: torch.nn.Module) -> None:
        self._plan = plan
        self._model = model
        self._sums = _Sums()
        self._sources: dict[Copy, torch.Tensor] = {}
        self.watch = _Watch(parameter for parameter in model.parameters())
        """To be entered around everything that the engine does to load."""

    def take(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Note tensors that the loader is about to be given, all of them planned."""
        for copy, source in self._plan.pieces(tensors):
            self.watch.taint(source)
            self._sources[copy] = self._sums.of(source, copy.destination.dtype)

    def failure(self) -> str | None:
        """What speaks against the plan, as a clause, when the engine has finished; else None."""
        if self.watch.computed is not None:
            return f"the engine computes with the weights ({self.watch.computed})"
        if not self._plan.fits(self._model):
            return "the engine moves its parameters"
        for name, copies in self._plan.copies.items():
            for copy in copies:
                if copy not in self._sources:
                    return f"{name} did not come"
                if not torch.equal(self._sources[copy], self._sums.of(copy.destination)):
                    return f"{name} is not in its parameter as it came"
        for fill in self._plan.fills:
            number = torch.full((), fill.value, dtype=fill.destination.dtype)
            value = number.to(fill.destination.device).expand(fill.destination.shape)
            if not torch.equal(self._sums.of(value), self._sums.of(fill.destination)):
                return "the padding of a parameter is not what the loader fills it with"
        return None


class _Sums:
    """Sums over the bytes of tensors that tell them apart; see the module."""

    def __init__(self) -> None:
        self._weights: dict[torch.device, torch.Tensor] = {}

    @torch.no_grad()
    def of(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The sum of `tensor` as it would be in `dtype`; int64, shape ()."""
        rows = tensor if tensor.dim() else tensor[None]
        height = max(1, CHUNK // max(1, rows[0].numel()))
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for part in torch.split(rows, height):
            flat = part.to(dtype or tensor.dtype).reshape(-1)
            for chunk in torch.split(flat.view(INTEGERS[flat.element_size()]), CHUNK):
                weights = self._weights_on(tensor.device)[: len(chunk)]
                total = total * 0x5851F42D4C957F2D + (chunk * weights).sum()
        return total

    def _weights_on(self, device: torch.device) -> torch.Tensor:
        if device not in self._weights:
            generator = torch.Generator("cpu")
            generator.seed()
            ends = -(2**63), 2**63 - 1
            weights = torch.randint(*ends, (CHUNK,), generator=generator, device="cpu")
            self._weights[device] = (weights | 1).to(device)
        return self._weights[device]


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows values through copies, and notes the first operation that does more with them."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.computed: str | None = None
        self._tainted: dict[int, StorageWeakRef] = {}
        for tensor in tensors:
            self.taint(tensor)

    def taint(self, tensor: torch.Tensor) -> None:
        """Follow what is in the storage of `tensor`."""
        storage = tensor.untyped_storage()
        # The reference keeps the storage's name from being given to another, but not its memory.
        self._tainted[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = {storage_of(t) for t in _tensors((args, kwargs))}
        if self.computed is not None or self._tainted.keys().isdisjoint(inputs):
            return result
        if func is aten.copy_.default:
            if storage_of(args[1]) in self._tainted:
                self.taint(args[0])
        elif func not in FILLS and not self._only_views(func, inputs, result):
            self.computed = str(func)
        return result

    def _only_views(self, func: Any, inputs: set[int], result: Any) -> bool:
        outputs = _tensors(result)
        same = all(storage_of(t) in inputs or t.is_meta for t in outputs)
        return bool(outputs) and same and not func._schema.is_mutable


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
