"""The engine's own module, and new weights for it.

Weights arrive in two steps. `stage` draws every tensor, checks names and shapes and copies what
cannot be used as it is; it changes nothing. `commit` then puts all of them in place. So a transfer
that fails, at whatever point, leaves the old weights whole.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from accelerate import init_empty_weights  # type: ignore[import-untyped]
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from agentrl.engines.base import WeightSource
from agentrl.errors import EngineError

__all__ = ["commit", "device_of", "has_weights", "skeleton", "stage"]


def skeleton(
    config: PretrainedConfig,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> PreTrainedModel:
    """A model without weights: parameters on the meta device, buffers on `device`.

    It costs no memory worth naming and takes its weights from the first update. `config` is
    copied, since an engine sets the attention implementation of its own module.
    """
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    model.tie_weights()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    return model


def device_of(model: nn.Module) -> torch.device:
    """Where a model computes; for one without weights, where its buffers are."""
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    return tensors[0].device if tensors else torch.device("cpu")


def has_weights(model: nn.Module) -> bool:
    """False while a parameter is on the meta device."""
    return not any(parameter.is_meta for parameter in model.parameters())


def stage(model: nn.Module, source: WeightSource, device: torch.device) -> dict[str, Tensor]:
    """Draw all weights of `source`, ready to be put in place; keys are those of `source`.

    Live tensors of the right dtype and device are taken as they are, others are copied. The source
    is iterated to its end whatever it yields, since other ranks take part.

    Raises:
        EngineError: names that are missing, unknown or given twice, or wrong shapes.
    """
    owners = _owners(model)
    staged: dict[str, Tensor] = {}
    faults: list[str] = []
    seen: dict[int, str] = {}
    for name, tensor in source.named_weights():
        parameter = owners.get(name)
        if parameter is None:
            faults.append(f"unknown {name}")
        elif id(parameter) in seen:
            faults.append(f"{name} given twice (as {seen[id(parameter)]} before)")
        elif parameter.shape != tensor.shape:
            faults.append(
                f"{name} has shape {tuple(tensor.shape)} instead of {tuple(parameter.shape)}"
            )
        else:
            seen[id(parameter)] = name
            # One dtype throughout; a copy even if only the lifetime asks for one.
            staged[name] = tensor.detach().to(device, parameter.dtype, copy=not source.live)
    named = {id(parameter): name for name, parameter in reversed(owners.items())}
    faults += [f"missing {name}" for key, name in named.items() if key not in seen]
    if faults:
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if faults[8:] else "")
        raise EngineError(
            f"weights of version {source.version} do not fit the engine's model, which keeps its "
            f"old ones: {shown}; build the engine from the learner's model configuration"
        )
    return staged


def commit(model: nn.Module, staged: dict[str, Tensor]) -> None:
    """Put staged weights in place, tied ones in every place they belong to."""
    owners = _owners(model)
    new = {
        id(owners[name]): nn.Parameter(tensor, requires_grad=False)
        for name, tensor in staged.items()
    }
    for module, attribute, old in list(_places(model)):
        setattr(module, attribute, new[id(old)])


def _owners(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every name of every parameter, tied ones under each of their names."""
    return dict(model.named_parameters(remove_duplicate=False))


def _places(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Every attribute that holds a parameter."""
    for module in model.modules():
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield module, attribute, parameter
