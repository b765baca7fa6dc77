"""What the embedded engine can run: decoders whose attention is a function of cached keys alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel

from agentrl.errors import EngineError

__all__ = ["check_supported"]

_LAYER_TYPES = {"full_attention", "sliding_attention"}
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def check_supported(model: PreTrainedModel, max_model_len: int) -> None:
    """Refuse a model that this engine would run wrongly.

    Sliding windows are fine: all keys are kept and the mask is the window's. Linear attention,
    chunked attention and encoders are not, nor is rotary scaling that changes with the length.

    Raises:
        EngineError: naming the model type and what stands in the way.
    """
    config = model.config
    kind = f"a model of type {config.model_type}"
    if config.is_encoder_decoder or not model.can_generate():
        raise EngineError(f"{kind} is not a decoder-only language model: choose a causal one")
    config = config.get_text_config()
    foreign = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    if foreign:
        raise EngineError(
            f"the embedded engine cannot run {kind}: it has layers of type "
            f"{', '.join(sorted(foreign))}, whose state is no key/value cache; choose another "
            "model or another engine.kind"
        )
    if not getattr(model, "_supports_attention_backend", False):
        raise EngineError(
            f"the embedded engine cannot run {kind}: its transformers implementation does not let "
            "attention be replaced; choose another model or another engine.kind"
        )
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise EngineError(
            f"the embedded engine cannot run {kind} with attn_logit_softcapping; choose another "
            "model or another engine.kind"
        )
    if getattr(config, "use_bidirectional_attention", False):
        raise EngineError(f"{kind} with bidirectional attention is not a causal language model")
    _check_length(config, kind, max_model_len)


def _check_length(config: Any, kind: str, max_model_len: int) -> None:
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and max_model_len > limit:
        raise EngineError(
            f"max_model_len is {max_model_len}, but the model allows {limit} positions "
            f"(max_position_embeddings): set engine.max_model_len to at most {limit}"
        )
    for rope in _rope_parameters(config):
        original = rope.get("original_max_position_embeddings") or limit or max_model_len
        if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE and max_model_len > original:
            raise EngineError(
                f"{kind} has rotary scaling {rope['rope_type']}, which changes with the length "
                f"beyond {original} tokens and makes cached keys wrong: set engine.max_model_len "
                f"to at most {original}"
            )


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """The rotary settings: one dictionary, or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        yield parameters
    yield from (value for value in parameters.values() if isinstance(value, dict))
