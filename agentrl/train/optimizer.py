"""The optimizer and the schedule of its learning rate."""

from __future__ import annotations

import math

import torch
from torch import nn

from agentrl.config import TrainConfig

__all__ = ["build_optimizer", "lr_scale"]


def build_optimizer(
    module: nn.Module, config: TrainConfig, *, lr: float | None = None
) -> torch.optim.AdamW:
    """AdamW (arXiv:1711.05101) of torch; biases and norms are not decayed. `lr` is `train.lr`
    unless it is given.

    Call it before the parameters are partitioned, when their shapes still tell them apart. It is
    torch's own on every device: DeepSpeed's CPU Adam does not resume bit for bit. On a GPU it is
    one kernel, which reads and writes each number once.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=lr or config.lr,
        betas=config.betas,
        fused=torch.cuda.is_available() and config.offload == "none",
    )


def lr_scale(progress: float, config: TrainConfig) -> float:
    """What the learning rate is multiplied by after `progress` training steps.

    Linear warm-up from 0 over `train.warmup_steps`, then as `train.lr_scheduler` says, down to 0
    after `train.max_steps`. The optimizer steps of one training step have parts of it: the second
    of four in the first one is at 0.25. So a run decays over its whole length however few optimizer
    steps its batches make.
    """
    if progress < config.warmup_steps:
        return progress / config.warmup_steps
    if config.lr_scheduler == "constant":
        return 1.0
    left = (config.max_steps - progress) / max(config.max_steps - config.warmup_steps, 1)
    if config.lr_scheduler == "linear":
        return max(left, 0.0)
    return 0.5 * (1.0 + math.cos(math.pi * (1.0 - max(left, 0.0))))
