"""Attention heads too small for vLLM's CPU kernels, served as larger ones that compute the same.

A head of `d` becomes one of `D = k * d` with zeros in it. RoPE turns the pair (i, i + d/2) by
theta^(-2i/d), so that pair i of `d` and pair k*i of `D` turn alike; a score is divided by sqrt(D)
instead of sqrt(d), for which the queries make up with a factor sqrt(k).
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig

from agentrl.errors import UsageError

__all__ = ["HeadPadding", "head_padding"]

KERNELS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of heads that vLLM 0.32 computes on a CPU."""

MODEL_TYPES = ("llama", "mistral")
"""Nothing but RoPE and scores happens to the heads of these."""

_PROJECTION = re.compile(r"\.self_attn\.([qkvo])_proj\.(weight|bias)$")


def head_padding(model: PretrainedConfig) -> HeadPadding | None:
    """What must be done for vLLM to serve `model` on a CPU; None where nothing must.

    Raises:
        UsageError: the heads have a size that vLLM cannot compute on a CPU.
    """
    size = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    if size in KERNELS:
        return None
    fitting = [kernel for kernel in KERNELS if kernel % size == 0]
    rope = getattr(model, "rope_parameters", None) or {}
    usual = rope.get("rope_type", "default") == "default" and "partial_rotary_factor" not in rope
    if not fitting or model.model_type not in MODEL_TYPES or not usual:
        raise UsageError(
            f"vLLM has no CPU kernels for attention heads of {size}, only for those of "
            f"{', '.join(map(str, KERNELS))}: use engine.kind sglang or transformers, or a GPU"
        )
    return HeadPadding(size, fitting[0])


@dataclass(frozen=True, slots=True)
class HeadPadding:
    """Turns weights and folders of a model with heads of `size` into those with heads of `padded`,
    a multiple."""

    size: int
    padded: int

    def weights(
        self, named: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The same weights by the same names, those of the attention padded."""
        for name, tensor in named:
            found = _PROJECTION.search(name)
            if found is None or found.groups() == ("o", "bias"):
                yield name, tensor
            elif found.group(1) == "o":
                yield name, self._pad(tensor.T, self._values()).T.contiguous()
            elif found.group(1) == "v":
                yield name, self._pad(tensor, self._values())
            else:
                factor = math.sqrt(self.padded / self.size) if found.group(1) == "q" else 1.0
                yield name, self._pad(tensor * factor, self._turned())

    def folder(self, model_folder: Path, target: Path) -> Path:
        """Write the model of a Hugging Face folder, padded, into `target` and return it."""
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for path in model_folder.iterdir():
            if path.suffix == ".safetensors":
                weights = dict(self.weights(load_file(path).items()))
                save_file(weights, target / path.name, metadata={"format": "pt"})
            elif path.is_file():
                shutil.copy2(path, target / path.name)
        config = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(config | {"head_dim": self.padded}))
        return target

    def _pad(self, tensor: torch.Tensor, places: list[int]) -> torch.Tensor:
        """Spread the rows of each head over the rows `places` of a larger one."""
        heads = tensor.reshape(-1, self.size, *tensor.shape[1:])
        padded = heads.new_zeros(heads.shape[0], self.padded, *heads.shape[2:])
        padded[:, places] = heads
        return padded.reshape(-1, *tensor.shape[1:])

    def _values(self) -> list[int]:
        return list(range(self.size))

    def _turned(self) -> list[int]:
        """Where RoPE turns a row by the same angle."""
        times = self.padded // self.size
        firsts = [times * i for i in range(self.size // 2)]
        return [*firsts, *(self.padded // 2 + place for place in firsts)]
