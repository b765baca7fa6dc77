"""The embedded engine computes a shared prefix once, and says exactly what it reused."""

import asyncio

import numpy as np
import pytest
from embedded_models import build, prompt, response_logprobs, serving, until_sampled

from agentrl.engines.embedded.prefill import plan_prefill
from agentrl.engines.embedded.slots import SlotTable
from agentrl.types import SamplingParams

PARAMS = SamplingParams(max_new_tokens=10, temperature=0.0)


async def test_each_turn_reuses_everything_but_the_last_sampled_token():
    plain = build()
    async with serving() as engine:
        context = prompt(30)
        cached = []
        for turn in range(4):
            out = await engine.generate(context, PARAMS, rollout_id="a")
            np.testing.assert_allclose(
                out.logprobs, response_logprobs(plain, context, out), atol=1e-4
            )
            cached.append(out.cached_tokens)
            context = [*context, *out.token_ids.tolist(), *prompt(7, seed=turn)]
    # Prompts of 30, 47, 64 and 81 tokens; the cache holds all sampled tokens but the last.
    assert cached == [0, 39, 56, 73]


async def test_a_repeated_prompt_computes_only_its_last_token():
    async with serving() as engine:
        first = await engine.generate(prompt(30), PARAMS)
        engine.stats()
        again = await engine.generate(prompt(30), PARAMS)
        stats = engine.stats()
    assert (first.cached_tokens, again.cached_tokens) == (0, 29)
    assert (stats["prefilled_tokens"], stats["prefill_steps"]) == (0, 0)
    assert again.token_ids.tolist() == first.token_ids.tolist()


async def test_siblings_that_arrive_together_compute_their_prompt_once():
    async with serving() as engine:
        outs = await asyncio.gather(
            *(engine.generate(prompt(40), SamplingParams(10, seed=i)) for i in range(8))
        )
        stats = engine.stats()
    assert [out.cached_tokens for out in outs] == [0] + [39] * 7
    assert stats["prefilled_tokens"] == 39
    assert (stats["prompt_tokens"], stats["cached_tokens"]) == (320, 273)
    for out in outs:
        np.testing.assert_allclose(
            out.logprobs, response_logprobs(build(), prompt(40), out), atol=1e-4
        )


async def test_siblings_with_different_ends_share_the_part_they_have_in_common():
    shared = prompt(60)
    prompts = [[*shared, *prompt(12, seed=i)] for i in range(5)]
    async with serving() as engine:
        outs = await asyncio.gather(*(engine.generate(ids, PARAMS) for ids in prompts))
        stats = engine.stats()
    assert [out.cached_tokens for out in outs] == [0] + [60] * 4
    assert stats["prefilled_tokens"] == 71 + 4 * 11
    for ids, out in zip(prompts, outs, strict=True):
        np.testing.assert_allclose(out.logprobs, response_logprobs(build(), ids, out), atol=1e-4)


async def test_a_late_sibling_copies_its_prefix_from_a_slot_that_is_still_running():
    async with serving() as engine:
        early = asyncio.create_task(engine.generate(prompt(40), SamplingParams(200, seed=1)))
        await until_sampled(engine, 1)
        late = await engine.generate(prompt(40), PARAMS)
        assert not early.done()
        out = await early
    assert late.cached_tokens == 39
    for result in (late, out):
        np.testing.assert_allclose(
            result.logprobs, response_logprobs(build(), prompt(40), result), atol=1e-4
        )


async def test_a_sibling_does_not_take_the_history_that_another_will_come_back_to():
    async with serving(max_num_seqs=4) as engine:
        first = await engine.generate(prompt(40), SamplingParams(10, seed=1))
        sibling = await engine.generate(prompt(40), SamplingParams(10, seed=2))
        turn_two = [*prompt(40), *first.token_ids.tolist(), 5, 6, 7]
        back = await engine.generate(turn_two, PARAMS)
    assert sibling.cached_tokens == 39
    assert back.cached_tokens == 49


async def test_the_prefix_used_longest_ago_makes_room():
    async with serving(max_num_seqs=2) as engine:
        for seed in (1, 2, 1, 3):
            await engine.generate(prompt(20, seed), PARAMS)
        kept = await engine.generate(prompt(20, 1), PARAMS)
        lost = await engine.generate(prompt(20, 2), PARAMS)
    assert kept.cached_tokens == 19
    assert lost.cached_tokens == 0


async def test_a_rewritten_history_reuses_only_what_still_agrees():
    ids = prompt(40)
    changed = [*ids[:25], 4, *ids[26:]]
    assert changed != ids
    async with serving() as engine:
        await engine.generate(ids, PARAMS)
        out = await engine.generate(changed, PARAMS)
    assert out.cached_tokens == 25
    np.testing.assert_allclose(out.logprobs, response_logprobs(build(), changed, out), atol=1e-4)


async def test_flushing_forgets_every_prefix():
    async with serving() as engine:
        await engine.generate(prompt(30), PARAMS)
        assert engine.stats()["cache_bytes"] > 0
        await engine.flush_cache()
        assert engine.stats()["cache_bytes"] == 0
        out = await engine.generate(prompt(30), PARAMS)
    assert out.cached_tokens == 0


async def test_the_cache_grows_with_use_and_not_with_the_limits():
    async with serving(max_num_seqs=256, max_model_len=2048) as engine:
        await engine.generate(prompt(30), PARAMS)
        used = engine.stats()["cache_bytes"]
        for seed in range(3):
            await engine.generate(prompt(100, seed), PARAMS)
        grown = engine.stats()["cache_bytes"]
    per_token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, head size, float32
    assert used == 1 * 64 * per_token
    assert used < grown <= 4 * 128 * per_token


@pytest.mark.parametrize("running", [1, 3, 7])
async def test_idle_slots_between_running_ones_change_nothing(running):
    async with serving() as engine:
        prompts = [prompt(20 + i, seed=i) for i in range(8)]
        await asyncio.gather(*(engine.generate(ids, PARAMS) for ids in prompts))
        again = prompts[8 - running :]
        outs = await asyncio.gather(*(engine.generate(ids, PARAMS) for ids in again))
    for ids, out in zip(again, outs, strict=True):
        assert out.cached_tokens == len(ids) - 1
        np.testing.assert_allclose(out.logprobs, response_logprobs(build(), ids, out), atol=1e-4)


async def test_padding_never_leaves_the_cache():
    plain = build()
    async with serving(max_model_len=64) as engine:
        out = await engine.generate(prompt(40), PARAMS)
        long = [*prompt(40), *out.token_ids.tolist(), *prompt(4)]
        # Five tokens to compute beside thirty-nine, six positions before the end of the cache.
        pair = [long, prompt(40, seed=1)]
        outs = await asyncio.gather(*(engine.generate(ids, PARAMS) for ids in pair))
        assert engine.stats()["prefill_steps"] == 2
    for ids, result in zip(pair, outs, strict=True):
        np.testing.assert_allclose(
            result.logprobs, response_logprobs(plain, ids, result), atol=1e-4
        )


def test_a_short_common_prefix_is_not_worth_another_wave():
    table = SlotTable(4)
    table.begin_round()
    waves = [table.place(np.array([1, *prompt(20, seed=i)], dtype=np.int32)).wave for i in range(4)]
    assert waves == [0, 0, 0, 0]


def test_prefill_computes_every_position_once_and_in_order():
    spans = [(0, 0, 1300), (1, 5, 40), (2, 100, 100), (3, 0, 33), (7, 9, 10)]
    done: dict[int, list[int]] = {}
    for group in plan_prefill(spans):
        assert [span[0] for span in group] == sorted({span[0] for span in group})
        for slot, start, end in group:
            done.setdefault(slot, []).extend(range(start, end))
    assert done == {slot: list(range(a, b)) for slot, a, b in spans if a < b}
