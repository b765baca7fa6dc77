"""Small random models of several families, and engines that run them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentrl.engines.base import WeightSource
from agentrl.engines.transformers import TransformersEngine
from agentrl.types import Generation

VOCAB = 97

_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    # Far from uniform, so that the most likely token is clear.
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, {"config": LlamaConfig, "tie_word_embeddings": True}),
    "qwen2": (Qwen2ForCausalLM, {"config": Qwen2Config}),
    "qwen3": (Qwen3ForCausalLM, {"config": Qwen3Config, "head_dim": 16}),
    "gemma": (GemmaForCausalLM, {"config": GemmaConfig, "head_dim": 16}),
    # A window shorter than the texts: every second layer forgets.
    "gemma3": (
        Gemma3ForCausalLM,
        {
            "config": Gemma3TextConfig,
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


def build(family: str = "llama", seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A model in evaluation mode; the same seed gives the same weights."""
    kind, settings = FAMILIES[family]
    settings = dict(settings)
    config = settings.pop("config")(**{**_SHAPE, **settings, **changes})
    torch.manual_seed(seed)
    return kind(config).eval()


@asynccontextmanager
async def serving(
    model: PreTrainedModel | None = None, **settings: Any
) -> AsyncIterator[TransformersEngine]:
    """A started engine, closed at the end; on a Llama of seed 0 unless a model is given."""
    settings = {"max_num_seqs": 8, "max_model_len": 512, **settings}
    engine = TransformersEngine(model if model is not None else build(), **settings)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def until_sampled(engine: TransformersEngine, count: int) -> None:
    """Wait until so many more tokens have been sampled."""
    total = 0.0
    while total < count:
        await asyncio.sleep(0)
        total += engine.stats()["sampled_tokens"]


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random ids."""
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


def full_logits(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """Logits [T, V] of one plain forward pass without any cache."""
    with torch.inference_mode():
        return model(torch.tensor([list(ids)])).logits[0]


def response_logprobs(
    model: PreTrainedModel, ids: Sequence[int], out: Generation, temperature: float = 1.0
) -> np.ndarray:
    """What a plain forward pass says of the sampled tokens."""
    sampled = out.token_ids.tolist()
    logits = full_logits(model, [*ids, *sampled])[len(ids) - 1 : -1]
    logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
    return logprobs.gather(1, torch.tensor(sampled)[:, None])[:, 0].numpy()


def weights_of(model: PreTrainedModel, version: int, *, live: bool) -> WeightSource:
    """A learner's weights: its own tensors, or ones that are overwritten when the next is drawn."""

    def fleeting():
        for name, tensor in model.named_parameters():
            lent = tensor.detach().clone()
            yield name, lent
            lent.fill_(float("nan"))

    def own():
        yield from model.named_parameters()

    return WeightSource(own if live else fleeting, version, live)
