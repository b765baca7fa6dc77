"""vLLM's route for tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.engines.answer import Sampled, version_spans
from agentrl.engines.expert_routes import read_npy
from agentrl.engines.http import EngineClient
from agentrl.engines.token_route import Permit, TokenRoute
from agentrl.types import SamplingParams

__all__ = ["VLLMTokens"]


class VLLMTokens(TokenRoute):
    """See `TokenRoute`."""

    kind = "vllm"

    async def _ask(
        self,
        client: EngineClient,
        token_ids: Sequence[int],
        params: SamplingParams,
        permit: Permit,
        sent: Callable[[], None],
    ) -> Sampled:
        body = {
            "request_id": permit.request_id,
            "token_ids": [int(token) for token in token_ids],
            "sampling_params": _sampling_params(params),
            "cache_salt": permit.cache_salt,
        }
        if permit.adapter is not None:
            body["model"] = permit.adapter
        replica = permit.place.replica
        headers = {} if replica is None else {"X-data-parallel-rank": str(replica)}
        path = "/inference/v1/generate"
        answer = await client.post(path, body, headers=headers, repeatable=True, sent=sent)
        choice = answer["choices"][0]
        details = answer["usage"].get("prompt_tokens_details") or {}
        return Sampled(
            token_ids=choice["token_ids"] or [],
            logprobs=_logprobs(choice["logprobs"]),
            spans=version_spans(choice),
            finish_reason=choice["finish_reason"],
            cached_tokens=details.get("cached_tokens") or 0,
            routed_experts=read_npy(routes) if (routes := choice.get("routed_experts")) else None,
        )


def _sampling_params(params: SamplingParams) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "max_tokens": params.max_new_tokens,
        "min_tokens": params.min_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "stop_token_ids": list(params.stop_token_ids),
        "ignore_eos": True,  # only stop_token_ids end a turn
        "detokenize": False,
    }
    if params.logprobs:
        fields["logprobs"] = 0  # of the sampled token, and of no other
    if params.seed is not None:
        fields["seed"] = params.seed
    return fields


def _logprobs(answer: Mapping[str, Any] | None) -> list[float] | None:
    if answer is None or answer["content"] is None:
        return None
    return [entry["logprob"] for entry in answer["content"]]
