"""How much arithmetic training needs, and how much a card could do.

Model FLOPs utilisation is the arithmetic that the model needs, over what the cards could have done
in the same time (arXiv:2204.02311, appendix B). Counted are the passes that train: not the scoring
before them, nor what gradient checkpointing computes again.

A weight of a linear layer costs 2 operations a token in the forward pass, 2 for the gradient of its
input and 2 for its own, which a frozen one has not: 6 or 4. Of a mixture of experts, those that a
token is sent to count. The head counts for the tokens that it is asked about; an embedding is
looked up and costs nothing. A query that attends to a key costs 4 * heads * head size in every
layer, and 12 with the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from agentrl.train.microbatch import TokenLayout

__all__ = ["ModelFlops", "Work", "peak_flops", "work_of"]

_PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L40": 181e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L4": 121e12,
}
"""bfloat16 without sparsity, by a part of the card's name, from the makers' data sheets. The first
that fits counts."""


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Operations a second that a card can do in `dtype`; None where that is not known here."""
    if dtype != "bfloat16":
        return None
    return next((peak for name, peak in _PEAKS.items() if name in device_name), None)


@dataclass(frozen=True, slots=True)
class Work:
    """What passes through a model had to compute."""

    tokens: int = 0
    """By the body."""
    questions: int = 0
    """Tokens whose probability the head was asked for."""
    pairs: int = 0
    """Queries, with each key that they attend to, themselves included."""

    def __add__(self, other: Work) -> Work:
        return Work(
            self.tokens + other.tokens,
            self.questions + other.questions,
            self.pairs + other.pairs,
        )


def work_of(layout: TokenLayout) -> Work:
    """The work of one pass, padding included."""
    rows, width = layout.input_ids_BT.shape
    pairs = rows * width * (width + 1) // 2
    if layout.tree is not None:
        pairs = layout.tree.num_pairs
    elif layout.positions_BT is not None:
        pairs = int((layout.positions_BT + 1).sum())
    return Work(rows * width, layout.targets_N.numel(), pairs)


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """Floating-point operations of training one model."""

    per_token: float
    """For each token that the body computes, attention apart."""
    per_question: float
    """For each token that the head is asked about."""
    per_pair: float
    """For each query and each key that it attends to, itself included."""

    @classmethod
    def of(cls, model: PreTrainedModel, *, head: bool = True) -> ModelFlops:
        """Count the weights of `model`, which must be whole; what is frozen is so already.

        Without `head` it is as if the model had none.
        """
        config = model.config.get_text_config()
        output, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        apart = {id(p) for layer in (output, embedding) for p in layer.parameters()}
        body = [(n, p) for n, p in model.named_parameters() if id(p) not in apart]
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        width = config.num_attention_heads * head_dim
        return cls(
            per_token=_weights_cost(body, _active_share(config)),
            per_question=_weights_cost(output.named_parameters(), 1.0) if head else 0.0,
            per_pair=12.0 * width * config.num_hidden_layers,
        )

    def __add__(self, other: ModelFlops) -> ModelFlops:
        return ModelFlops(
            self.per_token + other.per_token,
            self.per_question + other.per_question,
            self.per_pair + other.per_pair,
        )

    def total(self, work: Work) -> float:
        """Operations of a forward and a backward pass."""
        return (
            self.per_token * work.tokens
            + self.per_question * work.questions
            + self.per_pair * work.pairs
        )


def _weights_cost(named: Iterable[tuple[str, nn.Parameter]], active_share: float) -> float:
    cost = 0.0
    for name, parameter in named:
        if parameter.ndim >= 2:
            share = active_share if ".experts." in name else 1.0
            cost += (6 if parameter.requires_grad else 4) * share * parameter.numel()
    return cost


def _active_share(config: Any) -> float:
    """The share of the experts' weights that one token meets."""
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    chosen = getattr(config, "num_experts_per_tok", None)
    return chosen / experts if experts and chosen else 1.0
