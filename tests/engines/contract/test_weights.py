"""New weights arrive whole, nothing old is used after them, and a failure is no half update."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
import torch
from engines.conftest import ALL, SERVERS, EngineUnderTest
from engines.interrupted import AfterOneBucket
from engines.tiny import greedy, logprobs_R, source_of

from agentrl.engines.base import PauseMode, WeightSource
from agentrl.engines.pool import EnginePool
from agentrl.engines.transport.base import WeightTransport
from agentrl.engines.transport.disk import DiskTransport
from agentrl.engines.transport.group import GroupTransport
from agentrl.engines.transport.ipc import IPCTransport
from agentrl.engines.transport.verified import VerifiedTransport
from agentrl.engines.weight_update import UpdateSettings, update_weights
from agentrl.errors import EngineError
from agentrl.types import SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="session")
every_engine = pytest.mark.parametrize("served", ALL, indirect=True)
every_server = pytest.mark.parametrize("served", SERVERS, indirect=True)

PROMPT = list(range(3, 60))
GREEDY = SamplingParams(12, temperature=0)


async def assert_speaks_for(served: EngineUnderTest, index: int, version: int) -> None:
    """The engine says exactly what a cold engine with these weights would say."""
    model = served.models[index]
    result = await served.engine.generate(PROMPT, GREEDY)
    ids = result.token_ids.tolist()
    assert ids == greedy(model, PROMPT, 12)
    assert result.logprobs is not None
    np.testing.assert_allclose(result.logprobs, logprobs_R(model, PROMPT, ids), atol=1e-4)
    assert set(result.weight_versions.tolist()) == {version}


def transports(folder: Path) -> dict[str, Callable[[], WeightTransport]]:
    return {
        "disk": lambda: DiskTransport(folder),
        "gloo": lambda: GroupTransport("gloo"),
        "ipc": IPCTransport,
        "ipc-verified": lambda: VerifiedTransport(IPCTransport(), DiskTransport(folder)),
    }


@every_engine
async def test_a_prompt_that_was_cached_under_old_weights_is_computed_anew(
    served: EngineUnderTest,
) -> None:
    # lmdeploy#4917, NeMo-RL PR#4018
    await served.engine.generate(PROMPT, GREEDY)
    version = await served.load(1)
    await assert_speaks_for(served, 1, version)
    assert served.engine.weight_version == version


@every_server
@pytest.mark.parametrize("name", ["disk", "gloo", "ipc"])
async def test_each_transport_brings_the_new_model(
    served: EngineUnderTest, name: str, tmp_path: Path
) -> None:
    if name == "ipc" and served.kind.startswith("fake"):
        return  # the fakes have no routes for shared memory
    assert isinstance(served.engine, EnginePool)
    transport = transports(tmp_path)[name]()
    for index in (1, 0, 1):
        version = next(served.versions)
        source = source_of(served.models[index], version)
        settings = UpdateSettings(bucket_bytes=1 << 16)
        await update_weights(served.engine.engines, source, transport, settings)
        served.held = index
        await assert_speaks_for(served, index, version)
    await transport.close()


@every_server
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 14, 1 << 30])
async def test_the_size_of_buckets_does_not_change_what_arrives(
    served: EngineUnderTest, bucket_bytes: int
) -> None:
    # sglang#14178: 1 byte makes a bucket of each tensor, the largest one of all together.
    assert isinstance(served.engine, EnginePool)
    version = next(served.versions)
    transport = GroupTransport("gloo")
    settings = UpdateSettings(bucket_bytes=bucket_bytes)
    await update_weights(
        served.engine.engines, source_of(served.models[1], version), transport, settings
    )
    await transport.close()
    served.held = 1
    await assert_speaks_for(served, 1, version)


@pytest.mark.parametrize("served", SERVERS[2:], indirect=True)
async def test_checksums_after_a_transfer_equal_those_after_a_load_from_disk(
    served: EngineUnderTest, tmp_path: Path
) -> None:
    assert isinstance(served.engine, EnginePool)
    version = next(served.versions)
    transport = transports(tmp_path)["ipc-verified"]()
    settings = UpdateSettings(bucket_bytes=1 << 16)
    await update_weights(
        served.engine.engines, source_of(served.models[1], version), transport, settings
    )
    served.held = 1
    await assert_speaks_for(served, 1, version)


@every_engine
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_every_token_says_which_weights_sampled_it(
    served: EngineUnderTest, mode: PauseMode
) -> None:
    params = SamplingParams(300, temperature=2.0)
    before = served.engine.weight_version
    requests = [
        asyncio.create_task(served.engine.generate(PROMPT[: 20 + i], params)) for i in range(4)
    ]
    await asyncio.sleep(0.3)
    if mode != "keep":
        await served.engine.pause(mode)
        await served.engine.resume()
    after = await served.load(1)
    results = await asyncio.gather(*requests)
    for i, result in enumerate(results):
        prompt, ids = PROMPT[: 20 + i], result.token_ids.tolist()
        assert set(result.weight_versions.tolist()) <= {before, after}
        assert result.logprobs is not None
        for index, version in ((0, before), (1, after)):
            mine = result.weight_versions == version
            expected = logprobs_R(served.models[index], prompt, ids, 2.0)
            np.testing.assert_allclose(result.logprobs[mine], expected[mine], atol=1e-4)
    changed = [len(set(r.weight_versions.tolist())) == 2 for r in results]
    assert any(changed) if mode == "keep" else not any(changed)


async def breaks() -> None:
    raise EngineError("the network is gone")


first_and_second = pytest.mark.parametrize("earlier", [0, 1])
"""Updates that a transport has made before: the buckets of the next one are known then."""


async def used_transport(served: EngineUnderTest, earlier: int) -> GroupTransport:
    """A transport that has made so many updates, to the weights that are there already."""
    assert isinstance(served.engine, EnginePool)
    transport = GroupTransport("gloo")
    for _ in range(earlier):
        source = source_of(served.models[served.held], next(served.versions))
        settings = UpdateSettings(bucket_bytes=1 << 14)
        await update_weights(served.engine.engines, source, transport, settings)
    return transport


@every_server
@first_and_second
async def test_a_transfer_that_breaks_is_an_error_and_a_retry_mends_it(
    served: EngineUnderTest, earlier: int
) -> None:
    # TRL PR#6913
    assert isinstance(served.engine, EnginePool)
    transport = await used_transport(served, earlier)
    settings = UpdateSettings(bucket_bytes=1 << 14)
    source = source_of(served.models[1], next(served.versions))
    in_flight = asyncio.gather(
        *(served.engine.generate(PROMPT, SamplingParams(450, temperature=2.0)) for _ in range(16)),
        return_exceptions=True,
    )
    await asyncio.sleep(0.1)
    broken = AfterOneBucket(transport, breaks)
    with pytest.raises(EngineError, match="network is gone"):
        await update_weights(served.engine.engines, source, broken, settings)
    ended = await in_flight
    assert any(isinstance(result, EngineError) and "update" in str(result) for result in ended)
    with pytest.raises(EngineError, match="network is gone"):
        await served.engine.generate(PROMPT, GREEDY)
    await update_weights(served.engine.engines, source, transport, settings)
    await transport.close()
    served.held = 1
    await assert_speaks_for(served, 1, source.version)


@pytest.mark.parametrize("served", SERVERS[:2], indirect=True)
async def test_a_server_gets_every_bucket_that_was_announced_also_where_the_learner_fails(
    served: EngineUnderTest,
) -> None:
    # Over NCCL, or where another process has the connections, it would wait for the rest.
    assert isinstance(served.engine, EnginePool)
    (engine,) = served.engine.engines
    assert engine.server is not None
    url = f"{engine.server.url}/fake/received"

    async def received() -> int:
        async with httpx.AsyncClient() as client:
            return int((await client.get(url)).json())

    before = await received()
    transport = await used_transport(served, 2)
    buckets = (await received() - before) // 2
    assert buckets > 2
    settings = UpdateSettings(bucket_bytes=1 << 14)
    source = source_of(served.models[1], next(served.versions))
    broken = AfterOneBucket(transport, breaks)
    with pytest.raises(EngineError, match="network is gone"):
        await update_weights(served.engine.engines, source, broken, settings)
    for _ in range(300):
        if await received() == before + 3 * buckets:
            break
        await asyncio.sleep(0.1)
    assert await received() == before + 3 * buckets
    await transport.close()
    await served.load(0)


@every_server
@first_and_second
async def test_a_server_that_hangs_in_a_transfer_is_given_up_in_time_and_takes_a_retry(
    served: EngineUnderTest, earlier: int
) -> None:
    # TRL PR#6913
    assert isinstance(served.engine, EnginePool)
    (engine,) = served.engine.engines
    assert engine.server is not None
    processes = psutil.Process(engine.server.pid).children(recursive=True)

    async def hangs() -> None:
        for process in processes:
            process.suspend()

    transport = await used_transport(served, earlier)
    source = source_of(served.models[1], next(served.versions))
    hanging = AfterOneBucket(transport, hangs)
    short = UpdateSettings(bucket_bytes=1 << 14, timeout=3.0)
    with pytest.raises(EngineError, match=r"within 3 s: raise engine\.update_timeout"):
        await update_weights([engine], source, hanging, short)
    for process in processes:
        process.resume()
    await update_weights([engine], source, transport, UpdateSettings(bucket_bytes=1 << 14))
    await transport.close()
    served.held = 1
    await assert_speaks_for(served, 1, source.version)


@every_server
@first_and_second
async def test_nobody_can_resume_before_the_update_has_ended(
    served: EngineUnderTest, earlier: int
) -> None:
    # open-instruct PR#1480, slime PR#2331
    assert isinstance(served.engine, EnginePool)
    half, rest = asyncio.Event(), asyncio.Event()

    async def waits() -> None:
        half.set()
        await rest.wait()

    transport = AfterOneBucket(await used_transport(served, earlier), waits)
    source = source_of(served.models[1], next(served.versions))
    settings = UpdateSettings(bucket_bytes=1 << 14)
    update = asyncio.create_task(update_weights(served.engine.engines, source, transport, settings))
    await half.wait()
    request = asyncio.create_task(served.engine.generate(PROMPT, GREEDY))
    with pytest.raises(EngineError, match=f"update to version {source.version} has not ended"):
        await served.engine.resume()
    await asyncio.sleep(0.2)
    assert not request.done()
    rest.set()
    await update
    await transport.inner.close()
    served.held = 1
    assert (await request).token_ids.tolist() == greedy(served.models[1], PROMPT, 12)
    await assert_speaks_for(served, 1, source.version)


@every_server
@pytest.mark.parametrize("change", ["one less", "one more", "another shape"])
async def test_weights_that_change_are_an_error_and_a_retry_brings_them(
    served: EngineUnderTest, change: str
) -> None:
    transport = await used_transport(served, 1)
    assert isinstance(served.engine, EnginePool)
    settings = UpdateSettings(bucket_bytes=1 << 14)
    weights = [(n, p.detach()) for n, p in served.models[1].named_parameters()]
    name, last = weights[-1]
    others = {
        "one less": weights[:-1],
        "one more": [*weights, ("one.more.weight", last)],
        "another shape": [*weights[:-1], (name, last[:-1])],
    }[change]
    version = next(served.versions)
    other = WeightSource(lambda: iter(others), version)
    with pytest.raises(EngineError, match=r"no longer those of the last update, from .*: update"):
        await update_weights(served.engine.engines, other, transport, settings)
    whole = WeightSource(lambda: iter(weights), version)
    await update_weights(served.engine.engines, whole, transport, settings)
    await transport.close()
    served.held = 1
    await assert_speaks_for(served, 1, version)


@every_server
async def test_the_source_is_drawn_to_its_end_even_when_the_transfer_breaks(
    served: EngineUnderTest,
) -> None:
    # Drawing is a collective: learner ranks that are left waiting would hang.
    assert isinstance(served.engine, EnginePool)
    drawn: list[str] = []

    def named_weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in served.models[0].named_parameters():
            drawn.append(name)
            yield name, parameter.detach()

    source = WeightSource(named_weights, next(served.versions))
    broken = AfterOneBucket(GroupTransport("gloo"), breaks)
    settings = UpdateSettings(bucket_bytes=1 << 14)
    with pytest.raises(EngineError):
        await update_weights(served.engine.engines, source, broken, settings)
    assert drawn == [name for name, _ in served.models[0].named_parameters()]
    await served.load(0)


@every_server
async def test_sleep_and_wake_in_order_keep_the_output(served: EngineUnderTest) -> None:
    # vLLM#15254, vLLM#29341
    before = await served.engine.generate(PROMPT, GREEDY)
    await served.engine.sleep(1)
    waiting = asyncio.create_task(served.engine.generate(PROMPT, GREEDY))
    with pytest.raises(EngineError, match="weights"):
        await served.engine.wake(("kv_cache",))
    await served.engine.wake(("weights",))
    assert not waiting.done()
    await served.engine.wake(("kv_cache",))
    assert (await waiting).token_ids.tolist() == before.token_ids.tolist()
