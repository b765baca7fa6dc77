"""New weights in the embedded engine: all or nothing, and nothing old is used after them."""

import asyncio

import numpy as np
import pytest
import torch
from embedded_models import build, prompt, response_logprobs, serving, until_sampled, weights_of

from agentrl.engines.base import WeightSource
from agentrl.engines.transformers import skeleton
from agentrl.errors import EngineError
from agentrl.types import SamplingParams

PARAMS = SamplingParams(max_new_tokens=12, temperature=0.0)
LONG = SamplingParams(max_new_tokens=60, seed=3)


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
async def test_after_an_update_the_same_prompt_gives_what_a_cold_engine_gives(family, live):
    learner = build(family, seed=1)
    async with serving(build(family, seed=0)) as engine:
        before = await engine.generate(prompt(30), PARAMS)
        await engine.update_weights(weights_of(learner, 5, live=live))
        after = await engine.generate(prompt(30), PARAMS)
        assert engine.weight_version == 5
    async with serving(build(family, seed=1)) as cold:
        expected = await cold.generate(prompt(30), PARAMS)
    assert before.token_ids.tolist() != after.token_ids.tolist()
    assert after.cached_tokens == 0
    assert after.token_ids.tolist() == expected.token_ids.tolist()
    np.testing.assert_array_equal(after.logprobs, expected.logprobs)
    assert before.weight_versions.tolist() == [0] * 12
    assert after.weight_versions.tolist() == [5] * 12


async def test_live_weights_are_shared_and_others_are_copied():
    learner, engine_model = build(seed=1), build(seed=0)
    async with serving(engine_model) as engine:
        await engine.update_weights(weights_of(learner, 1, live=True))
        for mine, theirs in zip(engine_model.parameters(), learner.parameters(), strict=True):
            assert mine.data_ptr() == theirs.data_ptr()
        await engine.update_weights(weights_of(learner, 2, live=False))
        for mine, theirs in zip(engine_model.parameters(), learner.parameters(), strict=True):
            assert mine.data_ptr() != theirs.data_ptr()
            assert torch.equal(mine, theirs)


async def test_live_weights_of_another_dtype_are_converted():
    learner = build(seed=1).to(torch.bfloat16)
    widened = build()
    widened.load_state_dict(learner.state_dict())
    async with serving() as engine:
        await engine.update_weights(weights_of(learner, 1, live=True))
        out = await engine.generate(prompt(9), PARAMS)
    np.testing.assert_allclose(out.logprobs, response_logprobs(widened, prompt(9), out), atol=1e-4)


async def test_a_skeleton_costs_no_memory_and_takes_its_weights_from_the_first_update():
    learner = build(seed=1)
    model = skeleton(learner.config)
    assert all(parameter.is_meta for parameter in model.parameters())
    async with serving(model) as engine:
        with pytest.raises(EngineError, match="no weights yet"):
            await engine.generate(prompt(9), PARAMS)
        await engine.update_weights(weights_of(learner, 0, live=True))
        out = await engine.generate(prompt(9), PARAMS)
    np.testing.assert_allclose(out.logprobs, response_logprobs(learner, prompt(9), out), atol=1e-4)
    # The learner's own module still runs with its own attention.
    assert learner.config._attn_implementation == "sdpa"
    assert model.lm_head.weight is model.model.embed_tokens.weight


def _without_norm(named):
    return [(name, tensor) for name, tensor in named if name != "model.norm.weight"]


def _with_unknown(named):
    return [*named, ("model.value_head.weight", torch.zeros(1))]


def _with_wrong_shape(named):
    return [(n, t[:-1] if n == "model.layers.1.mlp.up_proj.weight" else t) for n, t in named]


def _with_tied_twice(named):
    return [*named, ("lm_head.weight", dict(named)["model.embed_tokens.weight"])]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_norm, "missing model.norm.weight"),
        (_with_unknown, "unknown model.value_head.weight"),
        (_with_wrong_shape, r"model.layers.1.mlp.up_proj.weight has shape \(47, 32\)"),
        (_with_tied_twice, "lm_head.weight given twice"),
    ],
)
@pytest.mark.parametrize("live", [True, False])
async def test_weights_that_do_not_fit_are_named_and_the_old_ones_stay(change, message, live):
    named = change(list(build(seed=1).named_parameters()))
    drawn = []

    def source():
        for name, tensor in named:
            yield name, tensor
            drawn.append(name)

    async with serving() as engine:
        before = await engine.generate(prompt(9), PARAMS)
        with pytest.raises(EngineError, match=message):
            await engine.update_weights(WeightSource(source, 1, live))
        after = await engine.generate(prompt(9), PARAMS)
        assert engine.weight_version == 0
    # Other ranks take part in the transfer: it is drawn to its end also when it is refused.
    assert len(drawn) == len(named)
    assert after.token_ids.tolist() == before.token_ids.tolist()
    assert after.weight_versions.tolist() == [0] * 12


async def test_a_transfer_that_breaks_in_the_middle_leaves_the_old_weights_and_can_be_retried():
    learner = build(seed=1)

    def broken():
        yield from list(learner.named_parameters())[:5]
        raise RuntimeError("the peer is gone")

    async with serving() as engine:
        before = await engine.generate(prompt(9), PARAMS)
        with pytest.raises(RuntimeError, match="the peer is gone"):
            await engine.update_weights(WeightSource(broken, 1))
        after = await engine.generate(prompt(9), PARAMS)
        await engine.update_weights(weights_of(learner, 1, live=False))
        new = await engine.generate(prompt(9), PARAMS)
    assert after.token_ids.tolist() == before.token_ids.tolist()
    np.testing.assert_allclose(new.logprobs, response_logprobs(learner, prompt(9), new), atol=1e-4)


async def test_a_request_kept_over_an_update_goes_on_under_the_new_weights():
    old, new = build(seed=0), build(seed=1)
    ids = prompt(20)
    async with serving() as engine:
        request = asyncio.create_task(engine.generate(ids, LONG))
        await until_sampled(engine, 10)
        await engine.pause("keep")
        await engine.update_weights(weights_of(new, 1, live=True))
        assert not request.done()
        await engine.resume()
        out = await request
        sibling = await engine.generate(ids, PARAMS)
    versions = out.weight_versions.tolist()
    change = versions.index(1)
    assert 10 <= change < 60
    assert versions == [0] * change + [1] * (60 - change)
    # Each part is what a forward pass of its version says: no key or value of the old one is left.
    by_old, by_new = response_logprobs(old, ids, out), response_logprobs(new, ids, out)
    np.testing.assert_allclose(out.logprobs[:change], by_old[:change], atol=1e-4)
    np.testing.assert_allclose(out.logprobs[change:], by_new[change:], atol=1e-4)
    np.testing.assert_allclose(sibling.logprobs, response_logprobs(new, ids, sibling), atol=1e-4)


async def test_a_request_that_has_begun_goes_on_before_others_begin():
    done = []
    async with serving(max_num_seqs=1) as engine:

        async def call(rollout_id):
            await engine.generate(prompt(9), LONG, rollout_id=rollout_id)
            done.append(rollout_id)

        begun = asyncio.create_task(call("r9"))
        await until_sampled(engine, 1)
        other = asyncio.create_task(call("r1"))
        await engine.update_weights(weights_of(build(seed=1), 1, live=True))
        await asyncio.gather(begun, other)
    assert done == ["r9", "r1"]


async def test_a_request_kept_without_an_update_is_as_if_never_paused():
    async with serving() as engine:
        whole = await engine.generate(prompt(20), LONG)
        await engine.flush_cache()
        request = asyncio.create_task(engine.generate(prompt(20), LONG))
        await until_sampled(engine, 10)
        await engine.pause("keep")
        engine.stats()
        await asyncio.sleep(0.02)
        assert engine.stats()["sampled_tokens"] == 0
        await engine.resume()
        out = await request
    assert out.token_ids.tolist() == whole.token_ids.tolist()
    np.testing.assert_array_equal(out.logprobs, whole.logprobs)


async def test_a_pause_that_waits_lets_running_requests_finish_and_starts_no_others():
    async with serving(max_num_seqs=2) as engine:
        long = asyncio.create_task(engine.generate(prompt(20), LONG))
        short = asyncio.create_task(engine.generate(prompt(9), PARAMS))
        queued = asyncio.create_task(engine.generate(prompt(10), PARAMS))
        await until_sampled(engine, 4)
        await engine.pause("wait")
        assert long.done()
        assert short.done()
        assert (await long).finish_reason == "length"
        late = asyncio.create_task(engine.generate(prompt(11), PARAMS))
        await asyncio.sleep(0.02)
        assert not queued.done()
        assert not late.done()
        assert engine.stats()["prompt_tokens"] == 0
        await engine.resume()
        assert len((await queued).token_ids) == len((await late).token_ids) == 12


async def test_a_pause_that_aborts_gives_the_tokens_so_far():
    async with serving(max_num_seqs=1) as engine:
        running = asyncio.create_task(engine.generate(prompt(20), LONG))
        queued = asyncio.create_task(engine.generate(prompt(10), PARAMS))
        await until_sampled(engine, 5)
        await engine.pause("abort")
        out, none = await running, await queued
        assert out.finish_reason == none.finish_reason == "abort"
        assert 5 <= len(out.token_ids) < 60
        assert len(none.token_ids) == 0
        assert len(out.token_ids) == len(out.logprobs) == len(out.weight_versions)
        await engine.resume()
        # What an abort left behind is a prefix like any other.
        more = await engine.generate([*prompt(20), *out.token_ids.tolist(), 9], PARAMS)
        assert more.cached_tokens == 20 + len(out.token_ids) - 1
