"""Norms, rotary positions and gated MLPs of a model as single GPU kernels, by liger-kernel."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from agentrl.errors import DependencyError, UsageError

__all__ = ["use_liger_kernels"]


def use_liger_kernels(model: PreTrainedModel) -> None:
    """Replace these layers of a model in place; its weights and their names stay.

    The language-model head stays too: the learner has its own way of scoring tokens. Rotary
    positions are replaced for every model of this type in the process.

    Raises:
        DependencyError: the package is not installed.
        UsageError: there is no GPU, or the package does not know this type of model.
    """
    if not torch.cuda.is_available():
        raise UsageError(
            "model.use_liger_kernel is set, but its kernels need a GPU and torch sees none: leave "
            "it out."
        )
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise DependencyError(
            "model.use_liger_kernel needs the package liger-kernel: pip install 'agentrl[liger]'"
        ) from error
    kind = model.config.model_type
    if kind not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UsageError(
            f"model.use_liger_kernel is set, but liger-kernel has nothing for models of type {kind}"
            ": leave it out."
        )
    from transformers.integrations.liger import apply_liger_kernel

    apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})
