"""The section `model`: the policy, and the LoRA beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import model_validator

from agentrl.config_base import NonNegativeInt, PositiveFloat, Section

__all__ = ["LoraConfig", "ModelConfig"]


class LoraConfig(Section):
    """Train low-rank factors beside frozen weights (arXiv:2106.09685). Needs the extra `peft`.

    Without dropout, under which the importance ratio would differ from 1 for unchanged weights.
    """

    rank: NonNegativeInt = 0
    """Of the factors; 0: no LoRA, all weights train."""
    alpha: PositiveFloat = 32.0
    """The product of the factors is added times alpha / rank."""
    target_modules: tuple[str, ...] = ()
    """Linear layers that get factors, by the end of their name (q_proj, v_proj); without any, all
    but the language-model head, which peft calls all-linear."""

    @model_validator(mode="after")
    def _refuse_what_would_be_ignored(self) -> LoraConfig:
        if self.rank == 0:
            why = "model.lora.rank is 0, which is no LoRA"
            self._refuse_ignored("model.lora", {"alpha", "target_modules"}, why)
        return self


class ModelConfig(Section):
    """The policy."""

    path: str = "tiny"
    """A Hugging Face folder or hub name, a .gguf file, or `tiny`: a small Llama-shaped model with
    random weights and a character tokenizer, built on the spot."""
    tokenizer: str | None = None
    """Folder or name of the tokenizer, if it is not beside the model."""
    chat_template: Path | None = None
    """A Jinja file that replaces the tokenizer's chat template."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the learner's weights and computation."""
    attn_implementation: str = "sdpa"
    """transformers' attention: sdpa, eager, flash_attention_2, ..."""
    use_liger_kernel: bool = False
    """Run the learner's norms, rotary positions and gated MLPs as single kernels of the package
    liger-kernel (the extra `liger`; GPUs only): less time and memory, and sums that differ in the
    last bits."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    lora: LoraConfig = LoraConfig()
