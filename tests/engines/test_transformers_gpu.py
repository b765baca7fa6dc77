"""The embedded engine on a GPU: the same behaviour where the weights are on a device."""

import asyncio

import numpy as np
import pytest
import torch
from embedded_models import FAMILIES, build, prompt, response_logprobs, serving, weights_of

from agentrl.engines.transformers import skeleton
from agentrl.types import SamplingParams

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(max_new_tokens=20, temperature=0.0)


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_mixed_batch_agrees_with_a_plain_forward_pass(family):
    requests = [
        (prompt(17), GREEDY),
        (prompt(90), SamplingParams(20, seed=1)),
        (prompt(33), SamplingParams(20, temperature=0.6, seed=2)),
        (prompt(33), SamplingParams(20, seed=3)),
        (prompt(5), SamplingParams(20, min_new_tokens=4, stop_token_ids=(9,), seed=4)),
    ]
    async with serving(build(family).cuda()) as engine:
        outs = await asyncio.gather(*(engine.generate(*request) for request in requests))
        cut = await engine.generate(prompt(17), SamplingParams(20, top_k=4, top_p=0.9, seed=5))
    plain = build(family)
    for (ids, params), out in list(zip(requests, outs, strict=True))[:4]:
        expected = response_logprobs(plain, ids, out, params.temperature or 1.0)
        np.testing.assert_allclose(out.logprobs, expected, atol=1e-4)
    assert outs[3].cached_tokens == 32
    assert cut.cached_tokens == 16
    assert np.isfinite(cut.logprobs).all()


async def test_a_skeleton_takes_weights_from_the_device_and_from_the_host():
    learner = build(seed=1).cuda()
    model = skeleton(learner.config, device="cuda")
    async with serving(model) as engine:
        await engine.update_weights(weights_of(learner, 1, live=True))
        shared = model.lm_head.weight.data_ptr() == learner.lm_head.weight.data_ptr()
        first = await engine.generate(prompt(20), GREEDY)
        await engine.update_weights(weights_of(build(seed=2), 2, live=False))
        second = await engine.generate(prompt(20), GREEDY)
    assert shared
    for seed, out in ((1, first), (2, second)):
        expected = response_logprobs(build(seed=seed), prompt(20), out)
        np.testing.assert_allclose(out.logprobs, expected, atol=1e-4)


async def test_bfloat16_weights_give_finite_logprobs_near_those_of_float32():
    async with serving(build().to(torch.bfloat16).cuda()) as engine:
        out = await engine.generate(prompt(40), SamplingParams(40, seed=0))
    expected = response_logprobs(build(), prompt(40), out)
    assert np.abs(out.logprobs - expected).mean() < 0.1
