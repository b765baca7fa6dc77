"""Sampling parameters under the names that OpenRLHF's agent files know from vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from agentrl.errors import AgentError
from agentrl.types import SamplingParams

__all__ = ["from_vllm_names", "to_vllm_names"]

_VLLM_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop_token_ids": "stop_token_ids",
    "seed": "seed",
}


def to_vllm_names(params: SamplingParams, overrides: Mapping[str, Any]) -> SimpleNamespace:
    """A copy of `params`, with `overrides`, that one episode may change as it likes."""
    values = {
        theirs: overrides.get(ours, getattr(params, ours)) for ours, theirs in _VLLM_NAMES.items()
    }
    values["stop_token_ids"] = list(values["stop_token_ids"])
    # Files ask whether log-probabilities are wanted, and how many beside the sampled one.
    return SimpleNamespace(**values, logprobs=0 if params.logprobs else None)


def from_vllm_names(value: Any) -> dict[str, Any]:
    """What `LLM.generate` takes, out of an object or a dict with vLLM's names.

    Raises:
        AgentError: it sets something that would have no effect.
    """
    if isinstance(value, Mapping):
        given = dict(value)
    elif isinstance(value, SimpleNamespace):
        given = vars(value)
    else:
        names = [name for name in _VLLM_NAMES.values() if hasattr(value, name)]
        if getattr(value, "ignore_eos", False):
            names.append("ignore_eos")  # is refused below
        given = {name: getattr(value, name) for name in names}
    unknown = given.keys() - _VLLM_NAMES.values() - {"logprobs"}
    if unknown:
        raise AgentError(
            f"sampling_params sets {', '.join(sorted(unknown))}, which has no effect here: use "
            f"{', '.join(sorted(_VLLM_NAMES.values()))}"
        )
    overrides = {
        ours: given[theirs] for ours, theirs in _VLLM_NAMES.items() if given.get(theirs) is not None
    }
    # vLLM writes "all tokens" as -1, too.
    if overrides.get("top_k", 0) < 0:
        overrides["top_k"] = 0
    return overrides
