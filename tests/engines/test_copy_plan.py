"""A plan of copies does bit for bit what the loader does, or there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from engines.loaders import SHAPES, FusedModel, bytes_of, new_weights, parameter, split
from torch import nn

from agentrl.engines.copy_plan import CopyPlan, NoPlanError, plan_copies, spec_of

Weights = Iterable[tuple[str, torch.Tensor]]


def plan_for(model: nn.Module, weights: Weights) -> CopyPlan:
    return plan_copies(model, {name: spec_of(tensor) for name, tensor in weights})


@pytest.mark.parametrize("size", range(1, len(SHAPES) + 1))
@pytest.mark.parametrize("rank", [None, 0, 1])
@pytest.mark.parametrize("sent", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("held", [torch.float32, torch.bfloat16])
def test_copies_from_buckets_of_any_size_are_bit_for_bit_what_the_loader_writes(
    size: int, rank: int | None, sent: torch.dtype, held: torch.dtype
) -> None:
    copied, loaded = FusedModel(held, rank), FusedModel(held, rank)
    plan = plan_for(copied, new_weights(0, sent))
    for seed in (1, 2):
        for bucket in split(new_weights(seed, sent), size):
            plan.copy(bucket)
        plan.fill()
        loaded.load_weights(new_weights(seed, sent))
        assert bytes_of(copied) == bytes_of(loaded)


def test_the_copies_are_those_of_the_loader_one_for_each_piece() -> None:
    plan = plan_for(FusedModel(rank=1), new_weights(0))
    (k,) = plan.copies["k"]  # rows 2 and 3 of 4, behind the 4 rows of q in the parameter
    assert (k.offset, k.stride, k.destination.shape) == (16, (8, 1), (2, 8))
    assert k.destination.storage_offset() == 32
    (down,) = plan.copies["down"]  # columns 6 to 11 of 12
    assert (down.offset, down.stride, down.destination.shape) == (6, (12, 1), (8, 6))
    assert plan.copies["head"] == ()
    assert plan.count == 11
    (padding,) = plan.fills
    assert (padding.value, padding.destination.shape) == (0, (6, 8))


def test_a_model_is_the_same_after_planning() -> None:
    model = FusedModel()
    model.load_weights(new_weights(0))
    before, places = bytes_of(model), [p.data_ptr() for p in model.parameters()]
    plan = plan_for(model, new_weights(1))
    assert bytes_of(model) == before
    assert [p.data_ptr() for p in model.parameters()] == places
    assert plan.fits(model)


def test_a_plan_does_not_fit_a_model_whose_parameter_has_moved() -> None:
    model = FusedModel()
    plan = plan_for(model, new_weights(0))
    model.norm.data = model.norm.data.clone()
    assert not plan.fits(model)


def test_a_permuted_copy_is_planned_too() -> None:
    model = one_parameter(lambda p, w: p.data.copy_(w.t().contiguous()), (3, 2))
    plan = plan_for(model, [("weight", torch.zeros(2, 3))])
    plan.copy([("weight", torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))])
    assert model.weight.tolist() == [[1, 4], [2, 5], [3, 6]]


def one_parameter(load: Callable[[Any, torch.Tensor], object], shape: tuple[int, ...]) -> Any:
    """A model of one parameter and one buffer, which `load` fills from one tensor."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = parameter(shape, torch.float32)
            self.register_buffer("scale", torch.ones(shape))

        def load_weights(self, weights: Weights) -> None:
            for _, tensor in weights:
                load(self.weight, tensor)

    return Model()


def fails(weight: nn.Parameter, tensor: torch.Tensor) -> None:
    raise KeyError("no such tensor")


def swallows(weight: nn.Parameter, tensor: torch.Tensor) -> None:
    try:
        weight.data.mul_(2)
    except RuntimeError:
        weight.data.copy_(tensor)


def twice(weight: nn.Parameter, tensor: torch.Tensor) -> None:
    weight.data.copy_(tensor)
    weight.data[:1].copy_(tensor[1:])


def replaces(weight: nn.Parameter, tensor: torch.Tensor) -> None:
    weight.data = torch.zeros(2, 2)
    weight.data.copy_(tensor)


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (lambda p, w: p.data.copy_(w * 2), "what is no view of a tensor"),
        (lambda p, w: p.data.copy_(w.double()), "what is no view of a tensor"),
        (lambda p, w: p.data.copy_(w[0]), "changes the shape"),
        (lambda p, w: p.data.copy_(w.view(torch.int32)), "changes the shape or the dtype"),
        (lambda p, w: p.data[:1].copy_(w[:1]), "does not write all of weight"),
        (lambda p, w: None, "does not write all of weight"),
        (twice, "writes a part of weight twice"),
        (lambda p, w: p.data.copy_(w).mul_(2), r"calls aten\.mul_"),
        (lambda p, w: p.data.copy_(w.mul_(2)), r"calls aten\.mul_"),
        (swallows, r"calls aten\.mul_"),
        (lambda p, w: p.data.fill_(w[0, 0].item()), "failed without values"),
        (fails, "failed without values .KeyError"),
        (replaces, "writes to what is no parameter"),
    ],
)
def test_a_load_that_does_more_than_copy_has_no_plan_and_leaves_the_model_alone(
    load: Callable[[Any, torch.Tensor], object], reason: str
) -> None:
    model = one_parameter(load, (2, 2))
    weight, place = model.weight, model.weight.data_ptr()
    with pytest.raises(NoPlanError, match=reason):
        plan_for(model, [("weight", torch.ones(2, 2))])
    assert model.weight is weight
    assert (weight.data_ptr(), weight.shape) == (place, (2, 2))
    assert weight.isnan().all()


def test_a_loader_that_sets_another_parameter_is_found_out_and_the_old_one_put_back() -> None:
    model = one_parameter(lambda p, w: None, (2, 2))
    old = model.weight

    def load_weights(weights: Weights) -> None:
        for name, tensor in weights:
            model.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    model.load_weights = load_weights
    with pytest.raises(NoPlanError, match="replaces parameters"):
        plan_for(model, [("weight", torch.ones(2, 2))])
    assert model.weight is old


def test_a_loader_that_writes_to_a_buffer_has_no_plan() -> None:
    model = one_parameter(lambda p, w: None, (2, 2))
    model.load_weights = lambda weights: [model.scale.copy_(tensor) for _, tensor in weights]
    with pytest.raises(NoPlanError, match="what is no parameter"):
        plan_for(model, [("scale", torch.ones(2, 2))])
    assert model.scale.tolist() == [[1, 1], [1, 1]]


def test_a_parameter_that_no_tensor_reaches_has_no_plan() -> None:
    with pytest.raises(NoPlanError, match="does not write all of down"):
        plan_for(FusedModel(), [pair for pair in new_weights(0) if pair[0] != "down"])
