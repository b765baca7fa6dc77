"""A plan is proven by a load that does no more than it, and refuted by one that does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engines.loaders import FusedModel, Named, new_weights, split
from torch import nn

from agentrl.engines.copy_plan import plan_copies, spec_of
from agentrl.engines.copy_proof import CopyProof


class Engine:
    """Loads as vLLM reloads: into tensors made for it, which are then copied into the model's."""

    def __init__(self) -> None:
        self.model = FusedModel(torch.bfloat16)
        weights = new_weights(0)
        self.plan = plan_copies(self.model, {name: spec_of(t) for name, t in weights})

    def load(self, weights: Named) -> None:
        fresh = FusedModel(torch.bfloat16)
        fresh.load_weights(weights)
        self.on_the_way(fresh)
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(getattr(fresh, name))
        self.finish(self.model)

    def on_the_way(self, model: nn.Module) -> None:
        """What the engine makes of the tensors that it loaded into."""

    def finish(self, model: nn.Module) -> None:
        """What the engine makes of the weights."""

    def prove(self, weights: Named) -> str | None:
        proof = CopyProof(self.plan, self.model)
        buckets = list(split(weights, 3))
        for bucket in buckets:
            proof.take(bucket)
        with proof.watch:
            self.load([pair for bucket in buckets for pair in bucket])
        return proof.failure()


def test_a_load_through_tensors_of_its_own_proves_the_plan() -> None:
    assert Engine().prove(new_weights(1)) is None


def test_a_weight_that_is_no_number_is_compared_by_its_bytes() -> None:
    weights = new_weights(1)
    weights[1][1].fill_(torch.nan)
    assert Engine().prove(weights) is None


def permutes(model: nn.Module) -> None:
    """The rows of q and k for another layout of heads."""
    model.qkv.data[:8] = model.qkv.data[:8].flip(0)


def shifts(model: nn.Module) -> None:
    model.norm.data.add_(1)


def keeps_a_copy(model: nn.Module) -> None:
    model.packed = model.down.data.to(torch.float32)


def keeps_a_number(model: nn.Module) -> None:
    model.largest = model.down.data.max().item()


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        (permutes, "computes with the weights .aten.flip"),
        (shifts, "computes with the weights .aten.add_"),
        (keeps_a_copy, "computes with the weights .aten._to_copy"),
        (keeps_a_number, "computes with the weights .aten.max"),
    ],
)
def test_an_engine_that_computes_with_the_weights_refutes_the_plan(
    finish: Callable[[nn.Module], None], reason: str
) -> None:
    engine = Engine()
    engine.finish = finish
    failure = engine.prove(new_weights(1))
    assert failure is not None
    assert failure.startswith("the engine " + reason.split(" .")[0])
    assert reason.split(" .")[1] in failure


def test_what_is_computed_on_the_way_refutes_the_plan_too() -> None:
    engine = Engine()
    engine.on_the_way = keeps_a_copy
    failure = engine.prove(new_weights(1))
    assert failure is not None
    assert failure.startswith("the engine computes with the weights (aten._to_copy")


def test_views_of_parameters_are_no_computation() -> None:
    engine = Engine()
    engine.finish = lambda model: setattr(model, "turned", model.down.t()[2:].detach())
    assert engine.prove(new_weights(1)) is None


def test_what_the_watch_cannot_see_shows_in_the_bytes() -> None:
    engine = Engine()
    weights = new_weights(1)
    proof = CopyProof(engine.plan, engine.model)
    proof.take(weights)
    with proof.watch:
        engine.load(weights)
    engine.model.gate_up.data[3, 5] += 0.5
    assert proof.failure() == "gate is not in its parameter as it came"
    engine.model.gate_up.data[3, 5] = weights[7][1][3, 5]
    assert proof.failure() is None
    engine.model.qkv.data[[0, 1]] = engine.model.qkv.data[[1, 0]]
    assert proof.failure() == "q is not in its parameter as it came"


def test_padding_that_the_engine_fills_otherwise_refutes_the_plan() -> None:
    engine = Engine()
    weights = new_weights(1)
    proof = CopyProof(engine.plan, engine.model)
    proof.take(weights)
    engine.load(weights)
    engine.model.embed.data[-1] = 1
    assert proof.failure() == "the padding of a parameter is not what the loader fills it with"


def test_a_parameter_that_moves_in_the_load_refutes_the_plan() -> None:
    engine = Engine()
    weights = new_weights(1)
    proof = CopyProof(engine.plan, engine.model)
    proof.take(weights)
    engine.load(weights)
    engine.model.norm.data = engine.model.norm.data.clone()
    assert proof.failure() == "the engine moves its parameters"


def test_a_tensor_that_did_not_come_proves_nothing() -> None:
    engine = Engine()
    engine.load(new_weights(1))
    assert engine.prove(new_weights(1)[:-2]) == "norm did not come"
