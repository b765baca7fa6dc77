"""Requests that a server would answer wrongly, or die of, are refused before they are sent."""

from __future__ import annotations

import pytest

from agentrl.engines.request_check import EngineLimits, check_request
from agentrl.errors import ContextOverflowError, EngineError
from agentrl.types import SamplingParams

LIMITS = EngineLimits(max_model_len=10, vocab_size=100)
KINDS = ("vllm", "sglang")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outside", [-1, 100])
def test_an_id_outside_the_vocabulary_is_refused_in_prompt_and_stop_list(
    kind: str, outside: int
) -> None:
    with pytest.raises(EngineError, match=f"the prompt has id {outside}, .* vocabulary of 100"):
        check_request(kind, [1, outside, 2], SamplingParams(1), LIMITS)
    stops = SamplingParams(1, stop_token_ids=(outside, 3))
    with pytest.raises(EngineError, match=f"stop_token_ids has id {outside}"):
        check_request(kind, [1], stops, LIMITS)
    check_request(kind, [0, 99], SamplingParams(1, stop_token_ids=(0, 99)), LIMITS)


@pytest.mark.parametrize(
    ("kind", "temperature", "sampled"),
    [
        ("vllm", 2.0, True),
        ("vllm", 2.01, False),
        ("vllm", 0.01, True),
        ("vllm", 0.009, False),
        ("vllm", 0.0, True),
        ("sglang", 5.0, True),
        ("sglang", 1e-7, False),
        ("sglang", 0.0, True),
    ],
)
def test_a_temperature_that_the_server_would_change_is_refused(
    kind: str, temperature: float, sampled: bool
) -> None:
    params = SamplingParams(1, temperature=temperature)
    if sampled:
        check_request(kind, [1], params, LIMITS)
    else:
        with pytest.raises(EngineError, match=f"{kind} samples at temperatures from"):
            check_request(kind, [1], params, LIMITS)


def test_what_does_not_fit_the_context_and_an_empty_prompt_are_refused() -> None:
    check_request("vllm", [1] * 6, SamplingParams(4), LIMITS)
    with pytest.raises(ContextOverflowError, match=r"engine\.max_model_len 10"):
        check_request("vllm", [1] * 7, SamplingParams(4), LIMITS)
    with pytest.raises(EngineError, match="no tokens"):
        check_request("vllm", [], SamplingParams(4), LIMITS)


def test_without_a_known_vocabulary_only_negative_ids_are_refused() -> None:
    limits = EngineLimits(max_model_len=10)
    check_request("vllm", [10**6], SamplingParams(1), limits)
    with pytest.raises(EngineError, match="id -1"):
        check_request("vllm", [-1], SamplingParams(1), limits)
