"""Several engines as one: same version everywhere, and the dead replaced without losing the run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from engines.conftest import REAL, server_config
from engines.interrupted import AfterOneBucket
from engines.tiny import greedy, source_of
from transformers import PreTrainedModel

from agentrl.config import Config
from agentrl.engines.base import WeightSource
from agentrl.engines.factory import make_engine
from agentrl.engines.pool import EnginePool
from agentrl.engines.remote import RemoteEngine
from agentrl.engines.server import free_port
from agentrl.engines.transport.group import GroupTransport
from agentrl.engines.weight_update import UpdateSettings, update_weights
from agentrl.errors import EngineError
from agentrl.types import SamplingParams

PROMPT = list(range(3, 60))
GREEDY = SamplingParams(8, temperature=0)
LONG = SamplingParams(400, temperature=2.0)
FAKES = ["fake-vllm", "fake-sglang"]


@asynccontextmanager
async def running(
    kind: str, model_folder: Path, run_dir: Path, **engine: Any
) -> AsyncIterator[EnginePool]:
    """A pool of engines that starts, and is closed whatever happens."""
    config = server_config(kind, **engine)
    pool = make_engine(config, run_dir=run_dir, model_folder=model_folder)
    assert isinstance(pool, EnginePool)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


def kill(engine: RemoteEngine) -> None:
    """Kill the server itself; its supervisor sees it end."""
    assert engine.server is not None
    psutil.Process(engine.server.pid).children()[0].kill()


async def kill_and_wait(engine: RemoteEngine) -> None:
    """Kill the server, until its engine knows."""
    assert engine.server is not None
    died = engine.server.died  # the next server has its own
    kill(engine)
    await asyncio.wait_for(died.wait(), 30)


async def all_come_to_hold(pool: EnginePool, model: PreTrainedModel, version: int) -> None:
    """Every engine samples from these weights, once those that died are back."""
    await asyncio.wait_for(pool.settled(), 60)
    for engine in pool.engines:
        result = await engine.generate(PROMPT, GREEDY)
        assert result.token_ids.tolist() == greedy(model, PROMPT, 8)
        assert set(result.weight_versions.tolist()) == {version}


def seed_of(engine: RemoteEngine) -> str:
    """The seed on the server's command line."""
    assert engine.server is not None
    line = psutil.Process(engine.server.pid).children()[0].cmdline()
    return line[[flag in ("--seed", "--random-seed") for flag in line].index(True) + 1]


async def interrupted_update(
    pool: EnginePool, source: WeightSource, interruption: Callable[[], Awaitable[None]]
) -> None:
    """An update of all engines, during which something happens after the first of many buckets."""
    transport = AfterOneBucket(GroupTransport("gloo"), interruption)
    try:
        await update_weights(pool.engines, source, transport, UpdateSettings(bucket_bytes=1 << 14))
    finally:
        await transport.close()


@pytest.mark.parametrize("kind", FAKES)
async def test_two_engines_share_the_groups_and_hold_one_version(
    kind: str, models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    async with running(kind, model_folder, tmp_path, num_engines=2) as pool:
        await pool.update_weights(source_of(models[1], 1))
        results = await asyncio.gather(
            *(
                pool.generate(PROMPT, GREEDY, rollout_id=f"{g}-{m}", group_id=f"{g}")
                for g in range(4)
                for m in range(4)
            )
        )
        expected = greedy(models[1], PROMPT, 8)
        assert all(result.token_ids.tolist() == expected for result in results)
        assert {int(v) for result in results for v in result.weight_versions} == {1}
        assert [engine.stats()["requests"] for engine in pool.engines] == [8.0, 8.0]
        # With one seed, both would sample the same answers to the same prompts.
        assert len({seed_of(engine) for engine in pool.engines}) == 2


@pytest.mark.parametrize("kind", FAKES)
async def test_a_server_that_dies_in_a_rollout_fails_it_and_comes_back_with_the_newest_weights(
    kind: str, models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    # UniRL#214, SkyRL#1173
    async with running(kind, model_folder, tmp_path, num_engines=2) as pool:
        await pool.update_weights(source_of(models[1], 1, live=True))
        rollout = asyncio.create_task(pool.engines[0].generate(PROMPT, LONG))
        await asyncio.sleep(0.1)
        kill(pool.engines[0])
        with pytest.raises(EngineError, match="server ended"):
            await rollout
        await asyncio.wait_for(pool.settled(), 120)
        result = await pool.engines[0].generate(PROMPT, GREEDY)
        assert result.token_ids.tolist() == greedy(models[1], PROMPT, 8)
        assert set(result.weight_versions.tolist()) == {1}


async def test_the_collector_of_a_server_leaves_alone_what_was_loaded(
    models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "engines" / "sglang-0.log"
    async with running("fake-sglang", model_folder, tmp_path) as pool:
        await pool.update_weights(source_of(models[1], 1, live=True))
        assert log.read_text().count("Freezing GC") == 1
        await kill_and_wait(pool.engines[0])
        await asyncio.wait_for(pool.settled(), 120)
        assert log.read_text().count("Freezing GC") == 2


async def test_a_server_that_cannot_keep_its_heap_from_the_collector_serves_all_the_same(
    models: list[PreTrainedModel],
    model_folder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    extra = {"cannot_freeze": True}
    async with running("fake-sglang", model_folder, tmp_path, extra=extra) as pool:
        await pool.update_weights(source_of(models[1], 1, live=True))
        await kill_and_wait(pool.engines[0])
        await asyncio.wait_for(pool.settled(), 120)
        result = await pool.generate(PROMPT, GREEDY)
    assert result.token_ids.tolist() == greedy(models[1], PROMPT, 8)
    said = [r.message for r in caplog.records if "garbage collections may stop" in r.message]
    assert len(said) == 2
    assert all("no memory" in message for message in said)


async def test_the_others_serve_while_one_engine_is_away(
    models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    async with running("fake-vllm", model_folder, tmp_path, num_engines=2) as pool:
        first = await pool.generate(PROMPT, GREEDY, rollout_id="r", group_id="g")
        await kill_and_wait(pool.engines[0])
        again = await pool.generate(PROMPT, GREEDY, rollout_id="r", group_id="g")
        assert again.token_ids.tolist() == first.token_ids.tolist()


async def test_an_only_engine_that_dies_is_waited_for(
    models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    async with running("fake-sglang", model_folder, tmp_path, transport="disk") as pool:
        await pool.update_weights(source_of(models[1], 3))
        await kill_and_wait(pool.engines[0])
        result = await asyncio.wait_for(pool.generate(PROMPT, GREEDY), 120)
        assert result.token_ids.tolist() == greedy(models[1], PROMPT, 8)
        assert set(result.weight_versions.tolist()) == {3}


async def test_an_engine_whose_weights_cannot_be_drawn_again_waits_for_the_next_update(
    models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    async with running("fake-vllm", model_folder, tmp_path) as pool:
        await pool.update_weights(source_of(models[1], 1, live=False))
        await kill_and_wait(pool.engines[0])
        with pytest.raises(EngineError, match="does not hold the newest weights"):
            await asyncio.wait_for(pool.generate(PROMPT, GREEDY), 120)
        await pool.update_weights(source_of(models[0], 2))
        result = await pool.generate(PROMPT, GREEDY)
        assert result.token_ids.tolist() == greedy(models[0], PROMPT, 8)


@pytest.mark.parametrize("kind", FAKES)
async def test_a_server_that_comes_back_while_the_learner_steps_waits_for_whole_weights(
    kind: str, models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    async with running(kind, model_folder, tmp_path) as pool:
        drawn = 0

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal drawn
            drawn += 1
            yield from models[1].named_parameters()

        await pool.update_weights(WeightSource(weights, version=1, live=True))
        await pool.weights_will_change()
        await kill_and_wait(pool.engines[0])
        await asyncio.wait_for(pool.settled(), 60)
        waiting = asyncio.create_task(pool.generate(PROMPT, GREEDY))
        await asyncio.sleep(0.2)
        assert drawn == 1
        assert not waiting.done()
        await pool.update_weights(source_of(models[0], 2, live=True))
        result = await waiting
        assert result.token_ids.tolist() == greedy(models[0], PROMPT, 8)
        assert set(result.weight_versions.tolist()) == {2}


@pytest.mark.parametrize("kind", FAKES)
async def test_an_update_waits_for_the_only_server_to_come_back(
    kind: str, models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    async with running(kind, model_folder, tmp_path) as pool:
        await pool.update_weights(source_of(models[0], 1, live=True))
        await kill_and_wait(pool.engines[0])
        await asyncio.wait_for(pool.update_weights(source_of(models[1], 2, live=True)), 60)
        result = await pool.generate(PROMPT, GREEDY)
        assert result.token_ids.tolist() == greedy(models[1], PROMPT, 8)
        assert set(result.weight_versions.tolist()) == {2}


@pytest.mark.parametrize("kind", FAKES)
@pytest.mark.parametrize("num_engines", [1, 2])
async def test_an_update_goes_on_where_a_server_dies_just_before_it(
    kind: str,
    num_engines: int,
    models: list[PreTrainedModel],
    model_folder: Path,
    tmp_path: Path,
) -> None:
    async with running(kind, model_folder, tmp_path, num_engines=num_engines) as pool:
        await pool.update_weights(source_of(models[0], 1, live=True))
        kill(pool.engines[0])  # nobody knows yet
        await asyncio.wait_for(pool.update_weights(source_of(models[1], 2, live=True)), 60)
        await all_come_to_hold(pool, models[1], 2)


@pytest.mark.parametrize("num_engines", [1, 2])
async def test_an_update_goes_on_where_a_server_dies_in_the_middle_of_it(
    num_engines: int, models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    async with running("fake-vllm", model_folder, tmp_path, num_engines=num_engines) as pool:
        victims = [pool.engines[0]]

        async def dies_once() -> None:
            if victims:
                await kill_and_wait(victims.pop())

        pool._transport = AfterOneBucket(pool._transport, dies_once)
        pool._update = UpdateSettings(bucket_bytes=1 << 14)
        await asyncio.wait_for(pool.update_weights(source_of(models[1], 1, live=True)), 60)
        await all_come_to_hold(pool, models[1], 1)


async def test_an_update_that_fails_where_no_server_died_is_an_error(
    models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    async def fails() -> None:
        raise EngineError("the transport broke")

    async with running("fake-vllm", model_folder, tmp_path) as pool:
        pool._transport = AfterOneBucket(pool._transport, fails)
        pool._update = UpdateSettings(bucket_bytes=1 << 14)
        with pytest.raises(EngineError, match="the transport broke"):
            await pool.update_weights(source_of(models[1], 1))


async def test_whoever_waits_for_weights_gets_an_error_when_the_pool_is_closed(
    models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    async with running("fake-vllm", model_folder, tmp_path) as pool:
        await pool.update_weights(source_of(models[1], 1, live=True))
        await pool.weights_will_change()
        await kill_and_wait(pool.engines[0])
        await asyncio.wait_for(pool.settled(), 60)
        waiting = asyncio.create_task(pool.generate(PROMPT, GREEDY))
        await asyncio.sleep(0.1)
        await pool.close()
        with pytest.raises(EngineError):
            await asyncio.wait_for(waiting, 10)


async def test_an_update_does_not_wait_for_a_server_that_cannot_be_started_again(
    models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    async with running("fake-vllm", model_folder, tmp_path) as pool:
        (engine,) = pool.engines
        assert engine.server is not None

        def no_command(port: int) -> list[str]:
            raise OSError("no space left on device")

        engine.server._command = no_command
        await kill_and_wait(engine)
        with pytest.raises(EngineError, match="no engine is alive"):
            await asyncio.wait_for(pool.update_weights(source_of(models[1], 1)), 30)


async def test_a_server_that_does_not_answer_after_a_restart_is_dead_and_tried_again(
    models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    async with running("fake-vllm", model_folder, tmp_path, num_engines=2) as pool:
        late, well = pool.engines
        assert late.server is not None
        late.server._start_timeout, late.server._health_path = 0.0, "/nothing-here"
        await kill_and_wait(late)
        await asyncio.wait_for(pool.settled(), 60)
        assert late.dead
        await pool.update_weights(source_of(models[1], 1, live=True))
        assert (late.weight_version, well.weight_version) == (0, 1)


async def test_an_update_that_finds_nobody_alive_when_its_turn_comes_waits(
    models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    async with running("fake-vllm", model_folder, tmp_path) as pool:
        async with pool._updating:
            update = asyncio.create_task(pool.update_weights(source_of(models[1], 1)))
            await asyncio.sleep(0.1)
            await kill_and_wait(pool.engines[0])
        await asyncio.wait_for(update, 60)
        result = await pool.generate(PROMPT, GREEDY)
        assert result.token_ids.tolist() == greedy(models[1], PROMPT, 8)
        assert set(result.weight_versions.tolist()) == {1}


@pytest.mark.parametrize("kind", FAKES)
async def test_an_update_that_meets_a_server_just_brought_back_reaches_it(
    kind: str, models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    """It waits for the lock that the one brought back still holds."""
    async with running(kind, model_folder, tmp_path, num_engines=2) as pool:
        met = asyncio.Event()

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            met.set()
            yield from models[0].named_parameters()

        await pool.update_weights(WeightSource(weights, version=1, live=True))
        met.clear()
        kill(pool.engines[0])
        await asyncio.wait_for(met.wait(), 60)  # it is given the weights again
        await pool.update_weights(source_of(models[1], 2, live=True))
        await pool.settled()
        assert [engine.weight_version for engine in pool.engines] == [2, 2]


@pytest.mark.parametrize("kind", FAKES)
async def test_a_server_that_dies_in_a_transfer_is_an_error_and_the_rest_take_a_retry(
    kind: str, models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    async with running(kind, model_folder, tmp_path, num_engines=2, max_restarts=0) as pool:

        async def dies() -> None:
            kill(pool.engines[1])

        with pytest.raises(EngineError):
            await interrupted_update(pool, source_of(models[1], 1), dies)
        await asyncio.wait_for(pool.engines[1].server.died.wait(), 30)  # type: ignore[union-attr]
        await pool.update_weights(source_of(models[1], 2))
        result = await pool.generate(PROMPT, GREEDY)
        assert result.token_ids.tolist() == greedy(models[1], PROMPT, 8)
        assert pool.weight_version == 2


async def test_one_engine_that_does_not_start_ends_the_others(
    model_folder: Path, tmp_path: Path
) -> None:
    config = server_config("fake-vllm", num_engines=2, extra={"exit_at_start": True})
    pool = make_engine(config, run_dir=tmp_path, model_folder=model_folder)
    with pytest.raises(EngineError, match="told to end"):
        await pool.start()


@pytest.mark.parametrize("kind", FAKES)
async def test_an_engine_that_cannot_sample_is_told_before_the_run(
    kind: str, model_folder: Path, tmp_path: Path
) -> None:
    config = server_config(kind, extra={"cannot_sample": True})
    pool = make_engine(config, run_dir=tmp_path, model_folder=model_folder)
    with pytest.raises(EngineError, match="no kernel for this model"):
        await pool.start()


@pytest.mark.slow
@pytest.mark.parametrize("kind", REAL)
async def test_a_real_server_that_dies_is_replaced_and_synchronized(
    kind: str, models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    async with running(kind, model_folder, tmp_path) as pool:
        await pool.generate(PROMPT, GREEDY)  # its prefix is cached under the weights at the start
        await pool.update_weights(source_of(models[1], 1, live=True))
        warm = await pool.generate(PROMPT, GREEDY)
        rollout = asyncio.create_task(pool.generate(PROMPT, LONG))
        await asyncio.sleep(0.2)
        kill(pool.engines[0])
        with pytest.raises(EngineError):
            await asyncio.wait_for(rollout, 30)
        cold = await pool.generate(PROMPT, GREEDY)
        assert cold.token_ids.tolist() == greedy(models[1], PROMPT, 8)
        assert set(cold.weight_versions.tolist()) == {1}
        # lmdeploy#4917, NeMo-RL PR#4018: a stale prefix would show in the warm engine's.
        assert warm.logprobs is not None
        assert cold.logprobs is not None
        assert warm.token_ids.tolist() == cold.token_ids.tolist()
        np.testing.assert_allclose(warm.logprobs, cold.logprobs, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", REAL)
async def test_a_real_server_that_dies_in_a_transfer_is_an_error_and_takes_a_retry(
    kind: str, models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    # TRL PR#6913
    async with running(kind, model_folder, tmp_path, max_restarts=1) as pool:
        await pool.update_weights(source_of(models[0], 1))
        server = pool.engines[0].server
        assert server is not None
        died = server.died  # the next server has its own

        async def dies() -> None:
            kill(pool.engines[0])

        with pytest.raises(EngineError):
            await interrupted_update(pool, source_of(models[1], 2), dies)
        await asyncio.wait_for(died.wait(), 30)
        await asyncio.wait_for(pool.settled(), 300)
        await pool.update_weights(source_of(models[1], 3))
        result = await pool.generate(PROMPT, GREEDY)
        assert result.token_ids.tolist() == greedy(models[1], PROMPT, 8)
        assert set(result.weight_versions.tolist()) == {3}


@pytest.mark.parametrize("kind", FAKES)
async def test_an_address_at_which_nothing_listens_is_named(
    kind: str, model_folder: Path, tmp_path: Path
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    engine = {"kind": kind.removeprefix("fake-"), "urls": (url,), "transport": "disk"}
    config = Config(agent="agent.py", engine=engine)  # type: ignore[arg-type]
    pool = make_engine(config, run_dir=tmp_path, model_folder=model_folder)
    with pytest.raises(EngineError, match=rf"nothing answers at {url}, which engine\.urls names"):
        await pool.start()
    await pool.close()


async def test_requests_go_on_before_the_metrics_of_a_pause_are_read(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = asyncio.Event()
    async with running("fake-vllm", model_folder, tmp_path) as pool, asyncio.timeout(60):
        (engine,) = pool.engines
        monkeypatch.setattr(engine, "refresh_stats", read.wait)
        await engine.pause("wait")
        resuming = asyncio.create_task(engine.resume())
        await engine.generate(PROMPT, SamplingParams(4))
        assert not resuming.done()
        read.set()
        await resuming


async def test_an_update_may_last_longer_than_a_request(
    models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    def slowly() -> Iterator[tuple[str, torch.Tensor]]:
        for index, (name, parameter) in enumerate(models[1].named_parameters()):
            time.sleep(0.5 if index < 4 else 0)
            yield name, parameter.detach()

    async with running("fake-vllm", model_folder, tmp_path, request_timeout=1.0) as pool:
        for version in (1, 2):
            await pool.update_weights(WeightSource(slowly, version))
        said = await pool.generate(PROMPT, SamplingParams(4, temperature=0))
        assert said.token_ids.tolist() == greedy(models[1], PROMPT, 4)
