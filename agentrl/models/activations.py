"""Activations that are computed twice instead of being kept."""

from __future__ import annotations

from transformers import PreTrainedModel

__all__ = ["recompute_activations"]


def recompute_activations(model: PreTrainedModel) -> None:
    """Keep no activations in forward, and compute them again in backward."""
    # transformers 5.17 has the old name only, its version 6 will have the new one only.
    renamed = hasattr(model, "activation_checkpointing_enable")
    name = "activation_checkpointing_enable" if renamed else "gradient_checkpointing_enable"
    getattr(model, name)({"use_reentrant": False})
