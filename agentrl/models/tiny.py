"""The built-in model `tiny`: a Llama-shaped policy small enough to train from nothing on a CPU.

The tokenizer has one token per printable ASCII character and newline. Anything else becomes
`<|unk|>`, so that text which an environment sends can always be encoded. The four role names are
single tokens, which keeps the ChatML header of a turn at three tokens instead of eleven.
"""

from __future__ import annotations

import torch
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["TINY", "build_tiny", "build_tiny_model", "build_tiny_tokenizer"]

TINY = "tiny"
"""The `model.path` that names this model."""

PAD, UNKNOWN, TURN_START, TURN_END = "<|pad|>", "<|unk|>", "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant", "tool")
CHARACTERS = ("\n", *map(chr, range(ord(" "), ord("~") + 1)))

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""


def build_tiny(seed: int) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Build the model (random weights drawn from `seed`, float32) and its tokenizer."""
    tokenizer = build_tiny_tokenizer()
    return build_tiny_model(tokenizer, seed), tokenizer


def build_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Build the character tokenizer with its ChatML template; the same one every time."""
    pieces = (PAD, UNKNOWN, TURN_START, TURN_END, *CHARACTERS)
    backend = Tokenizer(WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=UNKNOWN))
    backend.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = Fuse()
    backend.add_tokens([AddedToken(role, normalized=False) for role in ROLES])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_tiny_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """Build a two-layer Llama for `tokenizer`; the global random state is left as it was."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model
