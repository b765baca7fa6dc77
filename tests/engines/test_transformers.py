"""The embedded engine samples what a plain forward pass of the same model says."""

import asyncio
from collections import Counter

import numpy as np
import pytest
import torch
from embedded_models import (
    FAMILIES,
    VOCAB,
    build,
    full_logits,
    prompt,
    response_logprobs,
    serving,
)
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from agentrl.engines.embedded.sampling import uniforms
from agentrl.engines.transformers import TransformersEngine
from agentrl.errors import ContextOverflowError, EngineError
from agentrl.types import SamplingParams


def greedy(tokens: int, **kwargs) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, temperature=0.0, **kwargs)


@pytest.mark.parametrize("family", FAMILIES)
async def test_greedy_tokens_and_logprobs_are_those_of_a_plain_forward_pass(family):
    plain = build(family)
    prompts = [prompt(length, seed=length) for length in (1, 3, 17, 40, 41, 5, 90, 33)]
    async with serving(build(family)) as engine:
        outs = await asyncio.gather(*(engine.generate(ids, greedy(20)) for ids in prompts))
    for ids, out in zip(prompts, outs, strict=True):
        logits = full_logits(plain, [*ids, *out.token_ids.tolist()])[len(ids) - 1 : -1]
        assert out.token_ids.tolist() == logits.argmax(-1).tolist()
        np.testing.assert_allclose(out.logprobs, response_logprobs(plain, ids, out), atol=1e-4)


async def test_more_requests_than_slots_all_complete():
    plain = build()
    prompts = [prompt(5 + i, seed=i) for i in range(20)]
    async with serving(max_num_seqs=3) as engine:
        outs = await asyncio.gather(
            *(engine.generate(ids, greedy(3 + i)) for i, ids in enumerate(prompts))
        )
        stats = engine.stats()
    for i, (ids, out) in enumerate(zip(prompts, outs, strict=True)):
        assert len(out.token_ids) == 3 + i
        np.testing.assert_allclose(out.logprobs, response_logprobs(plain, ids, out), atol=1e-4)
    assert stats["requests"] == stats["finish_length"] == 20
    assert stats["sampled_tokens"] == sum(3 + i for i in range(20))
    assert 1 < stats["mean_batch_size"] <= 3


async def test_a_prompt_longer_than_one_prefill_pass_is_computed_rightly():
    ids = prompt(1300)
    async with serving(max_model_len=1400) as engine:
        out, _ = await asyncio.gather(
            engine.generate(ids, greedy(8)), engine.generate(prompt(700, 1), greedy(8))
        )
    np.testing.assert_allclose(out.logprobs, response_logprobs(build(), ids, out), atol=1e-4)


async def test_logprobs_are_those_of_the_distribution_at_the_sampling_temperature():
    ids = prompt(9)
    async with serving() as engine:
        out = await engine.generate(ids, SamplingParams(30, temperature=0.6, seed=3))
    plain = build()
    np.testing.assert_allclose(out.logprobs, response_logprobs(plain, ids, out, 0.6), atol=1e-4)
    assert np.abs(out.logprobs - response_logprobs(plain, ids, out, 1.0)).max() > 0.01


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (0, 0.7), (8, 0.8)])
async def test_truncated_sampling_keeps_to_its_tokens_and_renormalises(top_k, top_p):
    ids = prompt(9)
    params = SamplingParams(40, temperature=1.3, top_k=top_k, top_p=top_p, seed=1)
    async with serving() as engine:
        out, full = await asyncio.gather(
            engine.generate(ids, params), engine.generate(prompt(4), SamplingParams(40, seed=2))
        )
    plain = build()
    sampled = out.token_ids.tolist()
    logits = full_logits(plain, [*ids, *sampled])[len(ids) - 1 : -1] / 1.3
    for step, token in enumerate(sampled):
        probs, order = torch.softmax(logits[step], -1).sort(descending=True)
        kept = list(range(top_k or VOCAB))
        within = probs[kept] / probs[kept].sum()
        count = int(((within.cumsum(0) - within) < top_p).sum())
        kept = order[:count].tolist()
        assert token in kept
        expected = torch.log_softmax(logits[step][kept], -1)[kept.index(token)]
        assert out.logprobs[step] == pytest.approx(expected.item(), abs=1e-4)
    # The other row of the batch is not cut.
    np.testing.assert_allclose(full.logprobs, response_logprobs(plain, prompt(4), full), atol=1e-4)


async def test_samples_follow_the_distribution():
    ids = prompt(6)
    async with serving(max_num_seqs=64) as engine:
        outs = await asyncio.gather(
            *(engine.generate(ids, SamplingParams(1, seed=seed)) for seed in range(3000))
        )
    counts = Counter(int(out.token_ids[0]) for out in outs)
    probs = torch.softmax(full_logits(build(), ids)[-1], -1).tolist()
    for token in range(VOCAB):
        # Five standard deviations of a binomial share.
        spread = 5 * (probs[token] * (1 - probs[token]) / 3000) ** 0.5
        assert abs(counts[token] / 3000 - probs[token]) <= spread + 1e-3


def test_random_numbers_are_a_pure_function_of_seed_and_count_and_never_repeat():
    seeds = np.repeat(np.array([0, 1, 2, 2**64 - 1], dtype=np.uint64), 1000)
    counts = np.tile(np.arange(1000, dtype=np.uint64), 4)
    numbers = uniforms(seeds, counts)
    np.testing.assert_array_equal(numbers[::-1], uniforms(seeds[::-1], counts[::-1]))
    assert len(set(numbers.tolist())) == 4000
    assert 0 <= numbers.min() < 0.002 < 0.998 < numbers.max() < 1
    assert numbers.mean() == pytest.approx(0.5, abs=0.02)
    assert np.corrcoef(numbers[:-1], numbers[1:])[0, 1] == pytest.approx(0, abs=0.06)


async def test_tokens_of_a_seeded_request_do_not_depend_on_who_shares_the_batch():
    ids, params = prompt(12), SamplingParams(24, seed=7)
    async with serving() as engine:
        alone = await engine.generate(ids, params)
        others = [engine.generate(prompt(5 + i, i), SamplingParams(30)) for i in range(6)]
        crowded, *_ = await asyncio.gather(engine.generate(ids, params), *others)
    assert crowded.token_ids.tolist() == alone.token_ids.tolist()


async def test_seeds_differ_and_a_request_without_one_draws_its_own():
    ids = prompt(12)
    async with serving() as engine:
        outs = await asyncio.gather(
            engine.generate(ids, SamplingParams(24, seed=0)),
            engine.generate(ids, SamplingParams(24, seed=1)),
            engine.generate(ids, SamplingParams(24)),
            engine.generate(ids, SamplingParams(24)),
        )
    assert len({tuple(out.token_ids.tolist()) for out in outs}) == 4


async def test_a_stop_token_ends_the_turn_and_is_kept():
    ids = prompt(8)
    async with serving() as engine:
        free = await engine.generate(ids, SamplingParams(30, seed=5))
        stop = int(free.token_ids[10])
        first = free.token_ids.tolist().index(stop)
        cut = await engine.generate(ids, SamplingParams(30, seed=5, stop_token_ids=(stop,)))
    assert free.finish_reason == "length"
    assert cut.finish_reason == "stop"
    assert cut.token_ids.tolist() == free.token_ids[: first + 1].tolist()


async def test_min_new_tokens_makes_stop_tokens_impossible_until_then():
    ids = prompt(8)
    async with serving() as engine:
        free = await engine.generate(ids, greedy(1))
        stop = int(free.token_ids[0])
        held = await engine.generate(ids, greedy(12, min_new_tokens=6, stop_token_ids=(stop,)))
    assert stop not in held.token_ids[:6]
    logits = full_logits(build(), ids)[-1].clone()
    logits[stop] = -torch.inf
    first = int(held.token_ids[0])
    assert first == int(logits.argmax())
    # The distribution sampled from is the one without the stop token.
    expected = torch.log_softmax(logits, -1)[first].item()
    assert held.logprobs[0] == pytest.approx(expected, abs=1e-4)


async def test_stop_tokens_are_possible_from_the_first_token_after_min_new_tokens():
    only = 7
    stops = tuple(token for token in range(VOCAB) if token != only)
    async with serving() as engine:
        out = await engine.generate(prompt(8), greedy(12, min_new_tokens=6, stop_token_ids=stops))
    assert out.token_ids[:6].tolist() == [only] * 6
    assert out.logprobs[:6].tolist() == [0.0] * 6
    logits = full_logits(build(), [*prompt(8), *[only] * 6])[-1]
    assert out.token_ids[6:].tolist() == [int(logits.argmax())]
    assert out.finish_reason == "stop"


async def test_logprobs_are_left_out_when_not_asked_for():
    async with serving() as engine:
        out = await engine.generate(prompt(4), SamplingParams(3, logprobs=False))
    assert out.logprobs is None


async def test_half_precision_models_are_sampled_from_full_precision_logits():
    async with serving(build().to(torch.bfloat16)) as engine:
        out = await engine.generate(prompt(9), SamplingParams(12, seed=0))
    plain = build().to(torch.bfloat16)
    np.testing.assert_allclose(out.logprobs, response_logprobs(plain, prompt(9), out), atol=0.15)


async def test_a_request_that_does_not_fit_is_refused_and_one_that_just_fits_is_not():
    async with serving(max_model_len=32) as engine:
        with pytest.raises(ContextOverflowError, match="33 tokens, more than max_model_len"):
            await engine.generate(prompt(20), greedy(13))
        out = await engine.generate(prompt(20), greedy(12))
    np.testing.assert_allclose(out.logprobs, response_logprobs(build(), prompt(20), out), atol=1e-4)


@pytest.mark.parametrize(
    ("ids", "params", "message"),
    [
        ([], greedy(1), "no tokens"),
        ([3, VOCAB], greedy(1), f"prompt has id {VOCAB}, outside the model's vocabulary"),
        ([3, -1], greedy(1), "prompt has id -1"),
        ([3], greedy(1, stop_token_ids=(2, 500)), "stop_token_ids has id 500"),
    ],
)
async def test_ids_that_the_model_does_not_have_are_refused(ids, params, message):
    async with serving() as engine:
        with pytest.raises(EngineError, match=message):
            await engine.generate(ids, params)


def _linear_attention_model():
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=2,
            num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16,
            linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
            linear_value_head_dim=8,
        )
    )  # fmt: skip


def _softcapped():
    return Gemma2ForCausalLM(
        Gemma2Config(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        )
    )  # fmt: skip


def _encoder():
    return BertForMaskedLM(
        BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=32,
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_linear_attention_model, "layers of type linear_attention"),
        (_softcapped, "attn_logit_softcapping"),
        (_encoder, "not a decoder-only language model"),
        (lambda: build(max_position_embeddings=64), "max_model_len is 128, but the model allows"),
        (
            lambda: build(
                rope_parameters={
                    "rope_type": "dynamic",
                    "rope_theta": 1e4,
                    "factor": 2.0,
                    "original_max_position_embeddings": 64,
                }
            ),
            "rotary scaling dynamic",
        ),
    ],
)
def test_a_model_that_would_run_wrongly_is_refused(make, message):
    with pytest.raises(EngineError, match=message):
        TransformersEngine(make(), max_num_seqs=2, max_model_len=128)
