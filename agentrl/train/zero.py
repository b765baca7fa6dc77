"""DeepSpeed ZeRO-3: the only file that knows it.

Parameters, gradients and optimizer state are spread over the ranks. One rank keeps its parameters
whole between steps, so that an engine in the same process can read them in place, unless they are
to stay in host memory.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.config import TrainConfig
from agentrl.errors import TrainingError
from agentrl.train.offload import HostCopy

__all__ = [
    "buckets",
    "end",
    "gather_in_buckets",
    "keeps_whole",
    "make_whole",
    "move_back",
    "move_to_host",
    "start_scoring",
    "start_training",
    "step_optimizer",
    "ulysses_attention",
]

BUCKET_NUMEL = 2**27
"""Elements that are gathered at once when weights leave the learner."""
WHOLE = 10**15
"""A persistence threshold above every parameter: none is partitioned between uses."""


def start_training(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    *,
    world_size: int,
) -> Any:
    """Hand a module and its optimizer to a DeepSpeed engine. A collective.

    Gradients of backward passes add up until `step`; DeepSpeed divides them by the number of ranks.
    """
    deepspeed = _import_deepspeed()
    settings = _settings(
        module,
        world_size,
        offload_weights=config.offload == "all",
        shards=config.tensor_parallel_size,
    )
    if config.offload != "none":
        settings["zero_optimization"]["offload_optimizer"] = _host_memory()
    settings["gradient_clipping"] = config.max_grad_norm
    settings["zero_allow_untested_optimizer"] = True
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
    _trust_inputs(engine)
    _forget_modules(engine)
    if config.offload == "none":
        _use_gradients_in_place(engine.optimizer, alone=world_size == 1)
    make_whole(engine)
    return engine


def start_scoring(
    module: nn.Module, *, world_size: int, offload: bool = False, shards: int = 1
) -> Any:
    """Hand a module that is never trained to a DeepSpeed engine. A collective.

    With `offload` its weights stay in host memory and go to the GPU a few at a time. `shards` is
    `train.tensor_parallel_size`.
    """
    deepspeed = _import_deepspeed()
    module.requires_grad_(False)
    settings = _settings(module, world_size, offload_weights=offload, shards=shards)
    engine, *_ = deepspeed.initialize(model=module, config=settings)
    _trust_inputs(engine)
    _forget_modules(engine)
    make_whole(engine)
    return engine


def end(engine: Any) -> None:
    """Free what an engine holds, its module too, which DeepSpeed would keep for good."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    engine.destroy()
    FWD_MODULE_STACK[:] = [module for module in FWD_MODULE_STACK if module is not engine.module]


def keeps_whole(config: TrainConfig, world_size: int) -> bool:
    """Whether the parameters of the trained module stay whole between uses."""
    return world_size == 1 and config.offload != "all"


def _trust_inputs(engine: Any) -> None:
    """Keep AutoTP from comparing the first inputs among ranks: it cannot compare plans of trees."""
    check = getattr(engine, "first_dataloader_check", None)
    if check is not None:
        check.remove()


def _forget_modules(engine: Any) -> None:
    """Where all parameters stay whole, take away the hooks that fetch and release them.

    They would run at every module, forward and backward, and keep the host busy for longer than a
    GPU computes.
    """
    if all(parameter.ds_persist for parameter in engine.module.parameters()):
        zero = engine.optimizer
        getattr(zero, "parameter_offload", zero).destroy()


def _use_gradients_in_place(zero: Any, *, alone: bool) -> None:
    """Spare a step the copies that DeepSpeed makes of gradients that lie side by side already.

    It joins the parts of a group to one tensor, which they are views of, and, to take the norm,
    converts each to float64; here one kernel reads them as such, where no rank has other parts.
    """
    join = zero.flatten

    def flatten(tensors: Sequence[Tensor]) -> Tensor:
        return _joined_in_place(tensors) if _adjacent(tensors) else join(tensors)

    zero.flatten = flatten
    if alone:

        def norm(gradients: list[Tensor], params: object, norm_type: float = 2) -> Tensor:
            flat = flatten(gradients)
            found = torch.linalg.vector_norm(flat, norm_type, dtype=torch.float64)
            return torch.where(found.isfinite(), found, -1.0)  # how it says that it is not

        zero.get_grad_norm_direct = norm


def _adjacent(tensors: Sequence[Tensor]) -> bool:
    """Whether each tensor begins in memory where the one before it ends."""
    return all(tensor.is_contiguous() for tensor in tensors) and all(
        a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.storage_offset() + a.numel() == b.storage_offset()
        and a.dtype == b.dtype
        for a, b in pairwise(tensors)
    )


def _joined_in_place(tensors: Sequence[Tensor]) -> Tensor:
    """Adjacent tensors as one of a dimension, without a copy."""
    count = sum(tensor.numel() for tensor in tensors)
    return tensors[0].as_strided((count,), (1,))


def step_optimizer(engine: Any, lr: float) -> float:
    """Clip the accumulated gradient, step at this learning rate and forget the gradient.

    Returns:
        The norm of the gradient before it was clipped.

    Raises:
        TrainingError: it was not finite.
    """
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
    engine.set_gradient_accumulation_boundary(True)
    _show_parts(engine)
    engine.step()
    make_whole(engine)
    grad_norm = float(engine.get_global_grad_norm())
    if not math.isfinite(grad_norm):
        raise TrainingError(
            f"The gradient is not finite ({grad_norm}), so that the weights are lost: resume "
            "from the last checkpoint with a lower train.lr, or clip with train.max_grad_norm."
        )
    return grad_norm


def ulysses_attention(**settings: Any) -> Callable[..., tuple[Tensor, None]]:
    """Attention whose heads are shared out among the ranks of a group (arXiv:2309.14509).

    Args:
        settings: DeepSpeed's: `attn` (of transformers' signature, called with all nodes and some
            heads), `process_group`, `batch_size`, the shape of the heads.

    Raises:
        ValueError: the heads cannot be shared out evenly.
    """
    _import_deepspeed()
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    attention: Callable[..., tuple[Tensor, None]] = UlyssesSPAttentionHF(**settings)
    return attention


def make_whole(engine: Any) -> None:
    """Let the parameters that stay whole between uses (on one rank: all) show their own part.

    One rank's part is the whole, so that nothing is copied, as DeepSpeed's gathering would; it is
    kept from that, which also spares the memory of a second copy.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    engine.optimizer.persistent_parameters = []
    for parameter in _whole_parameters(engine):
        parameter.data = parameter.ds_tensor.data.view(parameter.ds_shape)
        parameter.ds_status = ZeroParamStatus.AVAILABLE


def _show_parts(engine: Any) -> None:
    """Say that parameters that stay whole are partitioned, as DeepSpeed wants them for a step.

    They share the memory of their parts; DeepSpeed would take it from them one by one, for which a
    GPU waits longer than for the step.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    for parameter in _whole_parameters(engine):
        parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE


def _whole_parameters(engine: Any) -> list[Any]:
    return [parameter for parameter in engine.module.parameters() if parameter.ds_persist]


def move_to_host(engines: Iterable[Any], device: torch.device) -> HostCopy:
    """Give back all memory of `device` that engines hold between uses; `move_back` undoes it.

    Nothing else may be asked of the engines meanwhile. A collective.
    """
    held: list[Tensor] = []
    for engine in engines:
        if whole := _whole_parameters(engine):
            whole[0].partition(whole)
        held += _held_tensors(engine)
    return HostCopy(tensor for tensor in held if tensor.device == device)


def move_back(engines: Iterable[Any], copy: HostCopy) -> None:
    """Take back what `move_to_host` gave. A collective."""
    copy.restore()
    for engine in engines:
        make_whole(engine)


def _held_tensors(engine: Any) -> Iterator[Tensor]:
    """The parts of the parameters and, where the engine trains, the float32 weights, the
    optimizer's state and the buffers of gradients."""
    yield from (parameter.ds_tensor for parameter in engine.module.parameters())
    zero = engine.optimizer
    if not hasattr(zero, "fp32_partitioned_groups_flat"):
        return
    yield from zero.fp32_partitioned_groups_flat
    yield zero.grad_partitions_flat_buffer
    yield from (bucket.buffer for bucket in zero.ipg_buckets.values() if bucket.buffer is not None)
    for state in zero.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))


def gather_in_buckets(named: Sequence[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, Tensor]]:
    """Yield whole parameters, gathered some at a time. A collective: every rank must exhaust it.

    A partitioned parameter has no elements of its own, so that sizes are `ds_numel`. A tensor is
    valid until the next one is drawn.
    """
    deepspeed = _import_deepspeed()
    for bucket in buckets(named, BUCKET_NUMEL):
        with deepspeed.zero.GatheredParameters([parameter for _, parameter in bucket]):
            for name, parameter in bucket:
                yield name, _joined(parameter)


def _joined(parameter: nn.Parameter) -> Tensor:
    """The whole of a parameter; AutoTP's from the shards of all ranks."""
    from deepspeed.module_inject.layers import DS_IS_REPLACED_MODULE

    shard = parameter.data
    if not getattr(parameter, DS_IS_REPLACED_MODULE, False):
        return shard
    parameter.gather_params([parameter])  # type: ignore[attr-defined]
    whole, parameter.data = parameter.data, shard
    return whole


def buckets(
    named: Sequence[tuple[str, nn.Parameter]], bucket_numel: int
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Cut partitioned parameters, in order, into runs of at most `bucket_numel` whole elements.

    A parameter that is larger alone is a bucket of its own.
    """
    bucket: list[tuple[str, nn.Parameter]] = []
    size = 0
    for name, parameter in named:
        numel: int = parameter.ds_numel  # type: ignore[attr-defined]
        if bucket and size + numel > bucket_numel:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, parameter))
        size += numel
    if bucket:
        yield bucket


def _settings(
    module: nn.Module, world_size: int, *, offload_weights: bool = False, shards: int = 1
) -> dict[str, Any]:
    bfloat16 = next(module.parameters()).dtype == torch.bfloat16
    whole = world_size == 1 and not offload_weights
    return {
        # Only their product is used, and only for reports: batches are cut elsewhere.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "steps_per_print": WHOLE,
        "bf16": {"enabled": bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_force_ds_cpu_optimizer": False,
        **({"tensor_parallel": {"autotp_size": shards}} if shards > 1 else {}),
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": WHOLE if whole else 0,
            "stage3_model_persistence_threshold": WHOLE,
            # It replaces torch's linear function for the whole process, which saves nothing
            # where weights stay whole.
            "memory_efficient_linear": not whole,
            **({"offload_param": _host_memory()} if offload_weights else {}),
        },
    }


def _host_memory() -> dict[str, Any]:
    return {"device": "cpu", "pin_memory": torch.cuda.is_available()}


def _import_deepspeed() -> Any:
    """Import it without what it prints, and without what it would compile."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # Ranks of this host. Without it DeepSpeed starts `numactl` in every backward to count them.
        os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # It reads this one wherever it likes, also in a process that runs alone.
    os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed
    import deepspeed.ops

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # It calls collectives of torch by names that torch has since renamed.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    # This extension takes minutes to compile; gloo does the same work.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(verbose=False)
    return deepspeed
