"""The embedded engine under many callers: repeatable, and sound when calls or passes fail."""

import asyncio
import logging
import random
import threading
from contextlib import ExitStack

import numpy as np
import pytest
from embedded_models import build, prompt, response_logprobs, serving, until_sampled, weights_of

from agentrl.engines.embedded.request import natural_order
from agentrl.engines.transformers import TransformersEngine
from agentrl.errors import EngineError
from agentrl.types import SamplingParams

PARAMS = SamplingParams(max_new_tokens=12, temperature=0.0)
LONG = SamplingParams(max_new_tokens=400, seed=3)


async def episodes(engine, jitter: random.Random | None, count: int = 12):
    """Multi-turn episodes whose environments take random times; all their log-probabilities."""

    async def pause():
        await asyncio.sleep(jitter.random() * 0.004 if jitter else 0)

    async def episode(index: int, stack):
        results = []
        with stack:
            context = prompt(20 + index // 4, seed=index // 4)
            for turn in range(1 + index % 3):
                await pause()
                params = SamplingParams(4 + (index * 5 + turn) % 7, seed=index * 10 + turn)
                out = await engine.generate(context, params, rollout_id=f"r{index}")
                results.append((out.token_ids.tolist(), out.logprobs.tobytes(), out.cached_tokens))
                context = [*context, *out.token_ids.tolist(), *prompt(3, seed=turn)]
            await pause()
        return results

    stacks = [ExitStack() for _ in range(count)]
    for stack in stacks:
        stack.enter_context(engine.participant())
    order = list(range(count))
    if jitter:
        jitter.shuffle(order)
    tasks = {i: asyncio.create_task(episode(i, stacks[i])) for i in order}
    return [await tasks[i] for i in range(count)]


async def test_a_run_repeats_bit_for_bit_however_long_its_callers_take():
    runs = []
    for seed in (None, 1, 2, 3):
        async with serving(max_num_seqs=5, straggler_timeout=60.0) as engine:
            runs.append(await episodes(engine, random.Random(seed) if seed else None))
            assert engine.stats()["straggler_timeouts"] == 0
    assert runs[1:] == runs[:1] * 3


async def test_waiting_requests_are_placed_by_rollout_id_in_natural_order():
    done = []
    async with serving(max_num_seqs=1) as engine:

        async def call(name):
            await engine.generate(prompt(5), PARAMS, rollout_id=name)
            done.append(name)

        await asyncio.gather(*(call(name) for name in ("r10", "r9", "q2", "r2", "r1-10", "r1-9")))
    assert done == ["q2", "r1-9", "r1-10", "r2", "r9", "r10"]


@pytest.mark.parametrize(
    "names", [["", "1", "2", "10", "a"], ["a", "a1", "a2b", "a10", "b"], ["0-2", "0-10", "1-1"]]
)
def test_natural_order_counts_numbers_as_numbers(names):
    shuffled = names[::-1]
    shuffled.sort(key=natural_order)
    assert shuffled == names


async def test_without_participants_nobody_is_waited_for():
    async with serving(straggler_timeout=60.0) as engine:
        await engine.generate(prompt(5), PARAMS)


async def test_an_engine_that_is_not_deterministic_waits_for_nobody():
    async with serving(deterministic=False, straggler_timeout=60.0) as engine:
        with engine.participant(), engine.participant():
            await engine.generate(prompt(5), PARAMS)


async def test_an_absent_participant_is_waited_for_until_it_leaves():
    async with serving(straggler_timeout=60.0) as engine:
        absent = ExitStack()
        absent.enter_context(engine.participant())
        with engine.participant():
            # Two calls of one rollout are one caller.
            calls = [engine.generate(prompt(5), PARAMS, rollout_id="a") for _ in range(2)]
            tasks = [asyncio.create_task(call) for call in calls]
            await asyncio.sleep(0.03)
            assert engine.stats()["decode_steps"] == 0
            absent.close()
            await asyncio.gather(*tasks)


async def test_a_straggler_is_given_up_once_per_weight_version_with_one_warning(caplog):
    caplog.set_level(logging.WARNING, logger="agentrl")
    async with serving(straggler_timeout=0.01) as engine:
        with engine.participant(), engine.participant():
            await engine.generate(prompt(5), PARAMS)
            await engine.generate(prompt(6), PARAMS)
            assert engine.stats()["straggler_timeouts"] == 1
            await engine.update_weights(weights_of(build(seed=1), 1, live=True))
            await engine.generate(prompt(5), PARAMS)
            assert engine.stats()["straggler_timeouts"] == 1
    assert len(caplog.records) == 1
    assert "will not repeat bit for bit" in caplog.text


async def test_patience_counts_from_the_end_of_the_last_step(monkeypatch):
    now = 0.0
    monkeypatch.setattr("agentrl.engines.transformers._now", lambda: now)
    model = build()

    def slow_pass(*_):
        nonlocal now
        now += 100.0

    async with serving(model, straggler_timeout=60.0) as engine:
        model.model.layers[0].register_forward_pre_hook(slow_pass)
        with engine.participant():
            with engine.participant():
                calls = [engine.generate(prompt(5), SamplingParams(n)) for n in (2, 20)]
                first, second = (asyncio.create_task(call) for call in calls)
                await first
                await asyncio.sleep(0.02)
                assert not second.done()
            await second
        assert engine.stats()["straggler_timeouts"] == 0


async def test_a_cancelled_call_gives_its_slot_to_the_next():
    async with serving(max_num_seqs=1) as engine:
        first = asyncio.create_task(engine.generate(prompt(20), LONG))
        waiting = asyncio.create_task(engine.generate(prompt(9), LONG))
        last = asyncio.create_task(engine.generate(prompt(10), PARAMS))
        await until_sampled(engine, 1)
        first.cancel()
        waiting.cancel()
        out = await last
        stats = engine.stats()
        assert (stats["running_requests"], stats["waiting_requests"]) == (0, 0)
        assert stats["cancelled_requests"] == 2
    assert first.cancelled()
    np.testing.assert_allclose(out.logprobs, response_logprobs(build(), prompt(10), out), atol=1e-4)


async def test_a_call_cancelled_during_a_pause_frees_its_slot_then():
    async with serving() as engine:
        call = asyncio.create_task(engine.generate(prompt(20), LONG))
        await until_sampled(engine, 1)
        await engine.pause("keep")
        assert engine.stats()["running_requests"] == 1
        call.cancel()
        await asyncio.wait([call])
        await asyncio.sleep(0.02)
        assert engine.stats()["running_requests"] == 0


async def test_a_failing_forward_pass_ends_the_requests_in_it_and_no_others():
    model = build()
    async with serving(model) as engine:
        failure = RuntimeError("out of memory")

        def fail(*_):
            raise failure

        running = [
            asyncio.create_task(engine.generate(prompt(20, seed), LONG)) for seed in range(3)
        ]
        await until_sampled(engine, 1)
        hook = model.model.layers[1].register_forward_pre_hook(fail)
        results = await asyncio.gather(*running, return_exceptions=True)
        hook.remove()
        for error in results:
            assert isinstance(error, EngineError)
            assert "RuntimeError: out of memory" in str(error)
            assert error.__cause__ is failure
        out = await engine.generate(prompt(20), PARAMS)
        assert engine.stats()["failed_requests"] == 3
    assert out.cached_tokens == 0
    np.testing.assert_allclose(out.logprobs, response_logprobs(build(), prompt(20), out), atol=1e-4)


async def test_broken_weights_are_an_error_and_poison_nothing():
    broken = build(seed=1)
    broken.model.norm.weight.data.fill_(float("nan"))
    async with serving() as engine:
        await engine.update_weights(weights_of(broken, 1, live=True))
        for params in (PARAMS, SamplingParams(5, seed=0), SamplingParams(5, top_k=3)):
            with pytest.raises(EngineError, match="not finite"):
                await engine.generate(prompt(9), params)
        await engine.update_weights(weights_of(build(), 2, live=True))
        out = await engine.generate(prompt(9), PARAMS)
    np.testing.assert_allclose(out.logprobs, response_logprobs(build(), prompt(9), out), atol=1e-4)


async def test_the_event_loop_runs_while_a_forward_pass_does():
    model = build()
    loop = asyncio.get_running_loop()
    entered, leave = asyncio.Event(), threading.Event()

    def held(*_):
        loop.call_soon_threadsafe(entered.set)
        assert leave.wait(timeout=30), "the event loop never ran during the forward pass"

    async with serving(model) as engine:
        hook = model.model.layers[1].register_forward_pre_hook(held)
        request = asyncio.create_task(engine.generate(prompt(20), PARAMS))
        await entered.wait()
        leave.set()
        await request
        hook.remove()


async def test_closing_fails_what_is_pending_and_leaves_no_thread():
    before = set(threading.enumerate())
    engine = TransformersEngine(build(), max_num_seqs=1, max_model_len=512)
    await engine.start()
    running = asyncio.create_task(engine.generate(prompt(20), LONG))
    queued = asyncio.create_task(engine.generate(prompt(9), LONG))
    await until_sampled(engine, 1)
    await engine.close()
    for call in (running, queued):
        with pytest.raises(EngineError, match="closed"):
            await call
    await engine.close()
    with pytest.raises(EngineError, match="closed"):
        await engine.generate(prompt(9), PARAMS)
    assert set(threading.enumerate()) == before


async def test_closing_ends_a_pause_that_waits():
    engine = TransformersEngine(build(), max_num_seqs=1, max_model_len=512)
    await engine.start()
    request = asyncio.create_task(engine.generate(prompt(20), LONG))
    await until_sampled(engine, 1)
    pause = asyncio.create_task(engine.pause("wait"))
    await asyncio.sleep(0)
    await engine.close()
    await pause
    with pytest.raises(EngineError, match="closed"):
        await request


async def test_an_engine_that_was_not_started_says_so():
    engine = TransformersEngine(build(), max_num_seqs=1, max_model_len=512)
    with pytest.raises(EngineError, match="not started"):
        await engine.generate(prompt(9), PARAMS)
    await engine.close()
