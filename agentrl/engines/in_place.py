"""When an engine may copy weights straight into its parameters instead of loading them.

The first update goes through the engine's loader and tells the names and shapes; from these the
plan is made. The second goes through the loader too, and proves the plan. All later ones are
copies. An engine whose plan fails stays with its loader. An update of other tensors than the plan
has is an error, since a part of it may already be in place; the one after it begins from the first
step. An update that is given up halfway changes nothing of this.

This file may import torch alone, as `copy_plan.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch

from .copy_plan import CopyPlan, NoPlanError, Spec, plan_copies, spec_of
from .copy_proof import CopyProof

__all__ = ["InPlaceUpdates", "NamedTensors", "OtherWeightsError"]

NamedTensors = Sequence[tuple[str, torch.Tensor]]
NAMED = 5
"""Weights that an error names one by one."""


class OtherWeightsError(RuntimeError):
    """An update that was to be copied brings others than the weights that are planned."""


class InPlaceUpdates:
    """Knows for one model whether the next update is loaded or copied. `say` writes to the log.

    With `placed_anew` the engine moves what was loaded about while it runs, so that a later load
    may put it elsewhere: then every update is loaded.
    """

    def __init__(
        self, model: torch.nn.Module, say: Callable[[str], None], *, placed_anew: bool = False
    ) -> None:
        self.model = model
        self._say = say
        self._specs: dict[str, Spec] = {}
        self._plan: CopyPlan | None = None
        self._proof: CopyProof | None = None
        self._proven = False
        self._never = placed_anew

    @property
    def copies(self) -> bool:
        """Whether the update that has begun is one of copies; else the engine loads it."""
        return self._proven

    def begin(self) -> None:
        """Begin an update, after whatever became of the one before."""
        self._specs, self._proof = {}, None
        if self._plan is None:
            return
        if not self._plan.fits(self.model):
            self._forget()
            self._say("weights are loaded again: the parameters of the model have moved")
        elif self._proven:
            self._plan.fill()  # here, since an update that turns out to be another is loaded on
        else:
            self._proof = CopyProof(self._plan, self.model)

    def loading(self) -> contextlib.AbstractContextManager[object]:
        """What the engine does around and in its loader, it does inside this."""
        return contextlib.nullcontext() if self._proof is None else self._proof.watch

    def note(self, tensors: NamedTensors) -> None:
        """Look at tensors that the loader is about to be given."""
        if self._never:
            return
        self._specs |= {name: spec_of(tensor) for name, tensor in tensors}
        if self._proof is None or self._plan is None:
            return
        if any(self._plan.specs.get(name) != spec_of(tensor) for name, tensor in tensors):
            self._forget()  # these are others than the last time: they are the ones to plan for
        else:
            self._proof.take(tensors)

    def loaded(self) -> None:
        """The loader has had everything, and the engine has finished with it."""
        if self._never:
            return
        if self._proof is None or self._plan is None or self._plan.specs != self._specs:
            self._proof = None
            self._make_plan()
            return
        failure = self._proof.failure()
        self._proof = None
        if failure is not None:
            self._give_up(failure)
            return
        self._proven = True
        self._say(f"weights are copied in place from now on: {self._plan.count} copies")

    def copy(self, tensors: NamedTensors) -> None:
        """Copy tensors to where the loader would have put them; a GPU may still be at it after.

        Raises:
            OtherWeightsError: the plan has no such tensor.
        """
        assert self._plan is not None, "only proven plans are carried out"
        for name, tensor in tensors:
            if self._plan.specs.get(name) != spec_of(tensor):
                self._forget()
                raise OtherWeightsError(
                    f"{name} ({tensor.dtype}, {list(tensor.shape)}) was not among the weights of "
                    "earlier updates: update again, which loads all of them anew"
                )
            self._specs[name] = spec_of(tensor)
        self._plan.copy(tensors)

    def copied(self) -> None:
        """Everything has been copied; see `copy`.

        Raises:
            OtherWeightsError: a tensor of the plan did not come.
        """
        assert self._plan is not None, "only proven plans are carried out"
        missing = sorted(self._plan.specs.keys() - self._specs.keys())
        if missing:
            self._forget()
            some = ", ".join(missing[:NAMED]) + (", ..." if len(missing) > NAMED else "")
            raise OtherWeightsError(
                f"{len(missing)} weights did not come that came in earlier updates ({some}): "
                "update again, which loads all of them anew"
            )

    def _make_plan(self) -> None:
        try:
            self._plan = plan_copies(self.model, self._specs)
        except NoPlanError as error:
            self._give_up(str(error))

    def _give_up(self, reason: str) -> None:
        self._forget()
        self._never = True
        self._say(f"weights go through the loader in every update: {reason}")

    def _forget(self) -> None:
        self._plan, self._proof, self._proven = None, None, False
