"""Loads the policy and its tokenizer from a folder, a hub name, a GGUF file, or `tiny`.

What comes back is ready to train: whole (not quantized), without dropout, and with a chat
template. Dropout would make the importance ratio differ from 1 under unchanged weights.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from agentrl.config import ModelConfig
from agentrl.errors import DependencyError, UsageError
from agentrl.models.tiny import TINY, build_tiny_model, build_tiny_tokenizer

__all__ = ["load_policy", "load_tokenizer"]


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer, with `model.chat_template` in place of its own template if given.

    Raises:
        UsageError: there is no such folder, file or hub name, no tokenizer, or no chat template.
    """
    source = config.tokenizer or config.path
    transformers_logging.disable_progress_bar()
    if source == TINY:
        tokenizer: PreTrainedTokenizerBase = build_tiny_tokenizer()
    else:
        location = _locate(source, "model.tokenizer" if config.tokenizer else "model.path")
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                **location, trust_remote_code=config.trust_remote_code
            )
        except (OSError, ValueError, KeyError) as error:
            raise UsageError(
                f"No tokenizer can be loaded from {source} ({_one_line(error)}): name a folder "
                "that has one with --model.tokenizer, or, for a hub name, check it and the network."
            ) from error
    if config.chat_template is not None:
        tokenizer.chat_template = _read_template(config.chat_template)
    if not tokenizer.chat_template:
        raise UsageError(
            f"The tokenizer of {source} has no chat template: "
            "give one as a Jinja file with --model.chat_template."
        )
    return tokenizer


def load_policy(config: ModelConfig, seed: int) -> PreTrainedModel:
    """Load the model on the CPU in `model.dtype`; `seed` draws the weights of `tiny`.

    Raises:
        UsageError: there is no such folder, file or hub name, or it holds no causal language model
            that this version of transformers can read.
    """
    dtype = getattr(torch, config.dtype)
    location = {} if config.path == TINY else _locate(config.path, "model.path")
    transformers_logging.disable_progress_bar()  # transformers draws one over ours for every load
    try:
        if config.path == TINY:
            model: PreTrainedModel = build_tiny_model(build_tiny_tokenizer(), seed).to(dtype)
            model.set_attn_implementation(config.attn_implementation)
        else:
            model = AutoModelForCausalLM.from_pretrained(
                **location,
                dtype=dtype,
                attn_implementation=config.attn_implementation,
                trust_remote_code=config.trust_remote_code,
            )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UsageError(
            f"No causal language model can be loaded from {config.path} ({_one_line(error)}): "
            "check --model.path (for a hub name, the network too) and --model.attn_implementation."
        ) from error
    if "gguf_file" in location:
        # The weights are whole now; a model that still calls itself quantized cannot be saved.
        del model.config.quantization_config
        model.hf_quantizer = None
        model.is_quantized = False
    _remove_dropout(model)
    return model


def _locate(source: str, flag: str) -> dict[str, Any]:
    """Turn a folder, hub name or GGUF file into arguments of `from_pretrained`."""
    path = Path(source).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UsageError(f"--{flag} {source} does not exist: give the path of a .gguf file.")
        _require_gguf()
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    if path.is_dir():
        return {"pretrained_model_name_or_path": str(path)}
    if path.exists():
        raise UsageError(f"--{flag} {source} is a file: give a model folder or a .gguf file.")
    if path.is_absolute() or source.startswith((".", "~")) or source.count("/") > 1:
        raise UsageError(
            f"--{flag} {source} does not exist: give a Hugging Face folder, a hub name, "
            "a .gguf file, or tiny."
        )
    return {"pretrained_model_name_or_path": source}


def _require_gguf() -> None:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise DependencyError(
            "Reading a .gguf file needs the package gguf: pip install 'agentrl[gguf]'."
        ) from error


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--model.chat_template {path} cannot be read ({error.strerror}): "
            "give the path of a Jinja file."
        ) from error


def _remove_dropout(model: PreTrainedModel) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


def _one_line(error: BaseException) -> str:
    """The beginning of a message of transformers, which often spans a page."""
    text = str(error).strip(" .:\n") or type(error).__name__
    return textwrap.shorten(text, 160, placeholder=" ...")
