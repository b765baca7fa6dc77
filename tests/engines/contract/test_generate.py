"""What every engine must get right about one request, whoever samples."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from engines.conftest import ALL, EngineUnderTest
from engines.tiny import EOS, MAX_MODEL_LEN, VOCAB_SIZE, greedy, logprobs_R

from agentrl.errors import ContextOverflowError, EngineError
from agentrl.types import SamplingParams

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("served", ALL, indirect=True),
]

PROMPT = list(range(3, 60))


async def test_greedy_tokens_and_logprobs_are_those_of_a_plain_forward_pass(
    served: EngineUnderTest,
) -> None:
    result = await served.engine.generate(PROMPT, SamplingParams(16, temperature=0))
    ids = result.token_ids.tolist()
    assert ids == greedy(served.model, PROMPT, 16)
    assert result.logprobs is not None
    np.testing.assert_allclose(result.logprobs, logprobs_R(served.model, PROMPT, ids), atol=1e-4)
    assert result.finish_reason == "length"


async def test_logprobs_are_those_of_the_sampling_distribution_at_temperature_0_6(
    served: EngineUnderTest,
) -> None:
    # TRL#4159, verl#6240: under unchanged weights the first importance ratio is 1.
    params = SamplingParams(32, temperature=0.6, stop_token_ids=(EOS,))
    result = await served.engine.generate(PROMPT, params)
    assert result.logprobs is not None
    expected = logprobs_R(served.model, PROMPT, result.token_ids.tolist(), 0.6)
    np.testing.assert_allclose(np.exp(expected - result.logprobs), 1.0, atol=1e-4)


async def test_a_stop_token_ends_the_turn_and_is_its_last_token(served: EngineUnderTest) -> None:
    said = greedy(served.model, PROMPT, 12)
    stop = said[5]
    params = SamplingParams(12, temperature=0, stop_token_ids=(stop, EOS))
    result = await served.engine.generate(PROMPT, params)
    assert result.token_ids.tolist() == said[: said.index(stop) + 1]
    assert result.finish_reason == "stop"


async def test_an_id_that_no_stop_list_names_is_an_ordinary_token(served: EngineUnderTest) -> None:
    params = SamplingParams(200, temperature=2.0)
    result = await served.engine.generate(PROMPT, params)
    assert len(result.token_ids) == 200


async def test_logprobs_that_were_not_asked_for_are_absent_not_zero(
    served: EngineUnderTest,
) -> None:
    result = await served.engine.generate(PROMPT, SamplingParams(4, logprobs=False))
    assert result.logprobs is None
    assert len(result.token_ids) == 4


async def test_later_turns_find_the_earlier_ones_in_the_cache(served: EngineUnderTest) -> None:
    await served.engine.flush_cache()
    context = list(range(3, 100))
    for turn in range(4):
        result = await served.engine.generate(
            context, SamplingParams(8, temperature=0), rollout_id="r", group_id="g"
        )
        whole_blocks = (len(context) - 24) // 32 * 32
        assert result.cached_tokens >= (whole_blocks if turn else 0)
        assert result.cached_tokens < len(context)
        context += [*result.token_ids.tolist(), *range(10, 26)]


async def test_a_request_that_does_not_fit_is_refused_and_one_that_just_fits_is_served(
    served: EngineUnderTest,
) -> None:
    prompt = [5 + i % 90 for i in range(MAX_MODEL_LEN - 4)]
    result = await served.engine.generate(prompt, SamplingParams(4, temperature=0))
    assert len(result.token_ids) == 4
    with pytest.raises(ContextOverflowError):
        await served.engine.generate([*prompt, 5], SamplingParams(4))


async def test_an_id_outside_the_vocabulary_is_refused_and_hurts_nobody(
    served: EngineUnderTest,
) -> None:
    with pytest.raises(EngineError):
        await served.engine.generate([3, VOCAB_SIZE], SamplingParams(4))
    assert len((await served.engine.generate([3, 4], SamplingParams(4))).token_ids) == 4


async def test_truncated_sampling_has_its_own_logprobs_or_is_refused(
    served: EngineUnderTest,
) -> None:
    params = SamplingParams(8, top_k=1)
    if served.kind.endswith("sglang"):
        with pytest.raises(EngineError, match="top-p"):
            await served.engine.generate(PROMPT, params)
    elif not served.kind.startswith("fake"):
        result = await served.engine.generate(PROMPT, params)
        assert result.logprobs is not None
        np.testing.assert_allclose(result.logprobs, 0.0, atol=1e-4)


async def test_a_seed_repeats_a_request_where_the_engine_keeps_seeds(
    served: EngineUnderTest,
) -> None:
    if served.kind == "sglang":
        return  # keeps them only with --enable-deterministic-inference, which needs a GPU
    params = SamplingParams(24, seed=7)
    first, second = [await served.engine.generate(PROMPT, params) for _ in range(2)]
    assert first.token_ids.tolist() == second.token_ids.tolist()


async def test_many_requests_at_once_are_all_answered_in_full(served: EngineUnderTest) -> None:
    params = SamplingParams(8)
    results = await asyncio.gather(
        *(served.engine.generate(PROMPT[: 5 + i % 40], params) for i in range(96))
    )
    assert [len(result.token_ids) for result in results] == [8] * 96


async def test_a_cancelled_request_is_ended_on_the_server(served: EngineUnderTest) -> None:
    request = asyncio.create_task(
        served.engine.generate(PROMPT, SamplingParams(400, temperature=2.0))
    )
    await asyncio.sleep(0.1)
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    served.engine.stats()
    await served.engine.pause("wait")
    await served.engine.resume()
    assert len((await served.engine.generate(PROMPT, SamplingParams(4))).token_ids) == 4


async def test_an_aborted_request_keeps_its_tokens_and_arrays_of_one_length(
    served: EngineUnderTest,
) -> None:
    # slime#1440
    request = asyncio.create_task(
        served.engine.generate(PROMPT, SamplingParams(400, temperature=2.0))
    )
    await asyncio.sleep(0.15)
    await served.engine.pause("abort")
    result = await request
    await served.engine.resume()
    assert result.finish_reason == "abort"
    assert result.logprobs is not None
    assert 0 < len(result.token_ids) < 400
    assert len(result.token_ids) == len(result.logprobs) == len(result.weight_versions)


async def test_stats_count_tokens_and_latency(served: EngineUnderTest) -> None:
    served.engine.stats()
    await served.engine.generate(PROMPT, SamplingParams(8))
    stats = served.engine.stats()
    assert stats["prompt_tokens"] == len(PROMPT)
    assert stats["sampled_tokens"] == 8
