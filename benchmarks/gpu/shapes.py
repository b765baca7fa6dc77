"""What the GPU benchmarks share: models with the shapes of public ones and random weights.

Nothing is downloaded: a tokenizer of single bytes has a vocabulary of full size, so that every
random id decodes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

__all__ = ["SHAPES", "build_model", "card", "model_config", "save_folder"]

END_OF_TEXT, START_OF_TURN, END_OF_TURN = 151643, 151644, 151645

SHAPES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "tiny": (
        Qwen2Config,
        {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
        },
    ),
    "qwen2.5-0.5b": (
        Qwen2Config,
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
        },
    ),
    "qwen2.5-1.5b": (
        Qwen2Config,
        {
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
        },
    ),
    "qwen2.5-7b": (
        Qwen2Config,
        {
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
            "vocab_size": 152064,
        },
    ),
    "qwen3-0.6b": (
        Qwen3Config,
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
            "vocab_size": 151936,
        },
    ),
}
"""The configuration class and the sizes that differ from its defaults; `tiny` is for trying."""

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def model_config(shape: str, *, layers: int | None = None) -> PretrainedConfig:
    """The configuration of a shape, with fewer layers if wanted."""
    kind, sizes = SHAPES[shape]
    sizes = sizes | ({"num_hidden_layers": layers} if layers else {})
    config = kind(
        max_position_embeddings=32768,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        bos_token_id=END_OF_TEXT,
        eos_token_id=END_OF_TURN,
        **sizes,
    )
    config.architectures = [kind.__name__.replace("Config", "ForCausalLM")]
    return config


def build_model(
    shape: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
    layers: int | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """Random weights, rounded to bfloat16 whatever `dtype` is, so that dtypes can be compared."""
    torch.manual_seed(seed)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            model_config(shape, layers=layers), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    return model.to(dtype)


def save_folder(shape: str, folder: Path) -> Path:
    """Write configuration and tokenizer, no weights: servers start with `load_format` dummy."""
    config = model_config(shape)
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    tokenizer = _byte_tokenizer(config.vocab_size)
    tokenizer.save_pretrained(folder)
    ends = {"bos_token_id": END_OF_TEXT, "eos_token_id": END_OF_TURN, "pad_token_id": END_OF_TEXT}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    return folder


def card() -> dict[str, str]:
    """Name of the GPU and versions of what a figure depends on."""
    import transformers

    return {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _byte_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Text encodes to 256 byte tokens; the other ids only decode."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {f"~{i:x}": i for i in range(len(vocab), END_OF_TEXT)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    spare = range(END_OF_TURN + 1, vocab_size)
    tokenizer.add_tokens([AddedToken(f"<|spare{i}|>", normalized=False) for i in spare])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
