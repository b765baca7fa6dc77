"""A tiny Llama with random weights, saved as a server loads it, and what it would say by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from agentrl.engines.base import WeightSource

VOCAB_SIZE = 128
MAX_MODEL_LEN = 512
EOS = 1


def build_model(seed: int, **changes: Any) -> PreTrainedModel:
    """Weights large enough that temperature 1 draws varied tokens and greedy has no near ties."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "eos_token_id": EOS,
        "bos_token_id": None,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    }
    config = LlamaConfig(**sizes | changes)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def save_model(model: PreTrainedModel, folder: Path) -> Path:
    """Save model and tokenizer as a folder that every server loads."""
    vocabulary = {"<pad>": 0, "<eos>": EOS} | {chr(c): c - 30 for c in range(32, 127)}
    for index in range(len(vocabulary), VOCAB_SIZE):
        vocabulary[f"<extra-{index}>"] = index
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def logprobs_R(
    model: PreTrainedModel, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
) -> NDArray[np.float32]:
    """Log-probabilities of the response under a plain forward pass."""
    logits = model(torch.tensor([[*prompt, *response]])).logits[0] / temperature
    table = torch.log_softmax(logits.float(), -1)
    rows = range(len(prompt) - 1, len(prompt) + len(response) - 1)
    return np.array([float(table[r, t]) for r, t in zip(rows, response, strict=True)], np.float32)


def greedy(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    """The most likely continuation, one forward pass a token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def source_of(model: PreTrainedModel, version: int, *, live: bool = False) -> WeightSource:
    """The weights of `model` as a learner gives them."""

    def named_weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in model.named_parameters():
            yield name, parameter.detach()

    return WeightSource(named_weights, version, live=live)
