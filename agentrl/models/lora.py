"""LoRA through peft (arXiv:2106.09685): frozen weights, with low-rank factors beside linear layers.

The layers are replaced inside the model, which keeps its class and its `forward`. Outside the
learner nothing else is known of it: weights leave merged, under the names of the model without
LoRA, or the factors leave alone, as a folder that peft and vLLM load.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from agentrl.config_model import LoraConfig
from agentrl.errors import DependencyError, UsageError

__all__ = ["Adapter"]

_NAME = "default"
"""peft's name of an adapter that has none."""
_BASE = ".base_layer"
_FACTOR_A, _FACTOR_B = f".lora_A.{_NAME}.weight", f".lora_B.{_NAME}.weight"
_PEFT_PREFIX = "base_model.model."

T = TypeVar("T")


class Adapter:
    """The factors of one model. It knows names and arithmetic; it holds no weights itself."""

    def __init__(self, model: PreTrainedModel, config: LoraConfig, *, seed: int, base: str) -> None:
        """Put factors into `model` and freeze all else of it. The product of new ones is 0.

        Args:
            config: with a rank above 0.
            seed: draws the first factor of each pair.
            base: path or name of the model, for the adapter's own configuration.

        Raises:
            DependencyError: peft is not installed.
            UsageError: `target_modules` names no layer, or one that is not linear or the head.
        """
        peft = _import_peft()
        self._config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=config.rank,
            lora_alpha=config.alpha,
            lora_dropout=0.0,
            target_modules=list(config.target_modules) or "all-linear",
            base_model_name_or_path=base,
            inference_mode=True,  # what a loader makes of the folder
        )
        named = ", ".join(config.target_modules)
        model.requires_grad_(False)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                peft.inject_adapter_in_model(self._config, model)
            except ValueError as error:
                raise UsageError(
                    f"model.lora.target_modules {named or '(all-linear)'} does not fit the model "
                    f"({error}): name linear layers of it, such as q_proj."
                ) from error
        self._scale = config.alpha / config.rank
        layers = {
            n: m for n, m in model.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)
        }
        self._layers = list(layers.values())
        unknown = [
            target
            for target in config.target_modules
            if not any(f".{name}".endswith(f".{target}") for name in layers)
        ]
        if unknown:
            raise UsageError(
                f"model.lora.target_modules {', '.join(unknown)} fits no layer of the model: name "
                "linear layers of it, such as q_proj."
            )
        head = model.get_output_embeddings()
        if any(layer is head or not isinstance(layer.base_layer, nn.Linear)
               for layer in self._layers):  # fmt: skip
            raise UsageError(
                f"model.lora.target_modules {named} names the head, or a layer that is not linear: "
                "name linear layers inside the model, such as q_proj."
            )
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(_is_factor(name))

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The model is its base in this block; all modules still run, as ZeRO-3 expects."""
        for layer in self._layers:
            layer.set_scale(_NAME, 0.0)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.set_scale(_NAME, 1.0)

    def factors(self, named: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
        """Those of the model's named parameters that are trained."""
        return [(name, value) for name, value in named if _is_factor(name)]

    def merge_order(self, named: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
        """The model's named parameters as `merged` wants them drawn: factors first."""
        return sorted(named, key=lambda pair: not _is_factor(pair[0]))

    def merged(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of a model without LoRA that computes the same.

        Args:
            named: all weights in `merge_order`. Each is read before the next is drawn; only the
                factors, which are small, are kept.

        Yields:
            Weights by Hugging Face name. Those with factors are new tensors, the others as drawn.
        """
        kept: dict[str, Tensor] = {}
        for name, weight in named:
            if _is_factor(name):
                kept[name] = weight.float().clone()
                continue
            module, base, rest = name.partition(_BASE)
            if base and rest == ".weight":
                change = kept[module + _FACTOR_B] @ kept[module + _FACTOR_A]
                weight = (weight.float() + self._scale * change).to(weight.dtype)
            yield module + rest, weight

    def save(self, folder: Path, factors: Mapping[str, Tensor]) -> None:
        """Write the factors, on the host and by name, as a folder that peft and vLLM load.

        Raises:
            OSError: it cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            _PEFT_PREFIX + name.replace(f".{_NAME}.", "."): weight.contiguous()
            for name, weight in factors.items()
        }
        try:
            save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        self._config.save_pretrained(str(folder))


def _is_factor(name: str) -> bool:
    return name.endswith((_FACTOR_A, _FACTOR_B))


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise DependencyError(
            "model.lora needs the package peft: pip install 'agentrl[peft]'."
        ) from error
    return peft
