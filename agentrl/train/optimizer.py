"""The optimizer and the schedule of its learning rate."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from agentrl.config import TrainConfig

__all__ = ["build_optimizer", "build_scheduler", "optimizer_steps"]


def build_optimizer(module: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW (arXiv:1711.05101) of torch; biases and norms are not decayed.

    Call it before the parameters are partitioned, when their shapes still tell them apart. It is
    torch's own on every device: DeepSpeed's CPU Adam does not resume bit for bit.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas
    )


def optimizer_steps(config: TrainConfig) -> int:
    """Optimizer steps of a whole run, however many turns its episodes have."""
    return config.max_steps * config.ppo_epochs * config.mini_batches


def build_scheduler(optimizer: torch.optim.Optimizer, config: TrainConfig) -> LRScheduler:
    """Linear warm-up from 0 over `warmup_steps` optimizer steps, then as `lr_scheduler` says."""
    # Under its plain name transformers' constant schedule would ignore the warm-up.
    name = "constant_with_warmup" if config.lr_scheduler == "constant" else config.lr_scheduler
    scheduler: LRScheduler = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=config.warmup_steps,
        num_training_steps=optimizer_steps(config),
    )
    return scheduler
