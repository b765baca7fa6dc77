"""SGLang's route for tokens, to a server itself or through sglang-router."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.engines.answer import Place, Sampled, version_spans
from agentrl.engines.expert_routes import read_plain
from agentrl.engines.http import EngineClient
from agentrl.engines.token_route import Permit, TokenRoute
from agentrl.errors import EngineError
from agentrl.types import SamplingParams

__all__ = ["RoutedSGLangTokens", "SGLangTokens"]

ROUTING_KEY = "X-SMG-Routing-Key"
"""Under the router's policy `manual`, requests of one key go to one server."""


class SGLangTokens(TokenRoute):
    """See `TokenRoute`."""

    kind = "sglang"

    def check(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        """Refuse what the server would not sample as asked; see `TokenRoute.check`."""
        super().check(token_ids, params)
        if params.logprobs and (params.top_p < 1 or params.top_k > 0):
            raise EngineError(
                "SGLang gives log-probabilities before top-p and top-k: sample with top_p 1 and "
                "top_k 0, or without log-probabilities (rollout.logprobs learner, logprobs_share 0)"
            )

    async def _ask(
        self,
        client: EngineClient,
        token_ids: Sequence[int],
        params: SamplingParams,
        permit: Permit,
        sent: Callable[[], None],
    ) -> Sampled:
        sampling = _sampling_params(params)
        if permit.computes_only:
            sampling |= {"max_new_tokens": 0, "min_new_tokens": 0}
        body: dict[str, Any] = {
            "rid": permit.request_id,
            "input_ids": [int(token) for token in token_ids],
            "sampling_params": sampling,
            "return_logprob": params.logprobs,
            "logprob_start_len": -1,  # 0 would switch the prefix cache off
            "extra_key": permit.cache_salt,
        }
        if permit.place.replica is not None:
            body["routed_dp_rank"] = permit.place.replica
        experts = self.limits.experts
        if experts is not None:
            body["return_routed_experts"] = True
        headers = self._headers(permit.place)
        answer = await client.post("/generate", body, headers=headers, repeatable=True, sent=sent)
        meta = answer["meta_info"]
        entries = meta.get("output_token_logprobs")
        routes = meta.get("routed_experts")
        return Sampled(
            token_ids=answer["output_ids"],
            logprobs=[entry[0] for entry in entries] if entries is not None else None,
            spans=version_spans(meta),
            finish_reason=meta["finish_reason"]["type"],
            cached_tokens=meta.get("cached_tokens", 0),  # it has none if it was ended in the queue
            routed_experts=read_plain(routes, *experts) if experts and routes else None,
        )

    def _headers(self, place: Place) -> Mapping[str, str]:
        return {}


class RoutedSGLangTokens(SGLangTokens):
    """The same through the router, which is told whose prefix a request has."""

    def _headers(self, place: Place) -> Mapping[str, str]:
        return {ROUTING_KEY: place.key} if place.key else {}


def _sampling_params(params: SamplingParams) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "max_new_tokens": params.max_new_tokens,
        "min_new_tokens": params.min_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k if params.top_k > 0 else -1,
        "stop_token_ids": list(params.stop_token_ids),
        # The flag would switch stop_token_ids off as well.
        "ignore_eos": not params.stop_token_ids,
    }
    if params.seed is not None:
        fields["sampling_seed"] = params.seed
    return fields
