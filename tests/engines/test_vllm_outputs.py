"""What vLLM's engine holds until a request ends: nothing is lost, late or of another version."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from pathlib import Path

import httpx
import numpy as np
import pytest
from engines.conftest import EngineUnderTest, python_of
from engines.tiny import logprobs_R

from agentrl.engines.pool import EnginePool
from agentrl.engines.vllm import install_plugin
from agentrl.types import SamplingParams

pytestmark = pytest.mark.engine

PROGRAM = Path(__file__).with_name("held_outputs_program.py")
real = pytest.mark.parametrize("served", ["vllm"], indirect=True)


async def tokens_told(pool: EnginePool) -> float:
    """Sampled tokens that the API server knows of."""
    (server,) = (engine.server for engine in pool.engines)
    assert server is not None
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"{server.url}/metrics")).text
    values = re.findall(r"^vllm:generation_tokens_total(?:{.*})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, values))


async def until_told(pool: EnginePool, count: float) -> None:
    async with asyncio.timeout(60):
        while await tokens_told(pool) < count:  # noqa: ASYNC110 (the server calls nobody)
            await asyncio.sleep(0.01)


def test_random_steps_are_told_as_they_were_and_in_fewer_pieces(tmp_path: Path) -> None:
    done = subprocess.run(
        [python_of("vllm"), PROGRAM, "0", "1", "2"],
        env=os.environ | {"PYTHONPATH": str(install_plugin(tmp_path / "plugin"))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for line in done.stdout.splitlines()[-3:]:
        told, sent = (int(word) for word in line.split())
        assert told < sent * 2 / 3


@pytest.mark.asyncio(loop_scope="session")
@real
async def test_a_pause_tells_the_tokens_so_far(served: EngineUnderTest) -> None:
    """Aborted in the middle of what is held, with every log-probability."""
    engine = served.engine
    assert isinstance(engine, EnginePool)
    params = SamplingParams(400)
    await asyncio.gather(*(engine.generate([5, 6, 7 + i], SamplingParams(4)) for i in range(8)))
    told = await tokens_told(engine)
    calls = [asyncio.create_task(engine.generate([5, 6, 7 + i], params)) for i in range(8)]
    await until_told(engine, told + len(calls))  # each has its first token, told at once
    await asyncio.sleep(0.1)  # more are held
    await engine.pause("abort")
    results = [await call for call in calls]
    await engine.resume()
    assert {result.finish_reason for result in results} == {"abort"}
    assert all(len(result.token_ids) for result in results)
    for i, result in enumerate(results):
        assert result.logprobs is not None
        own = logprobs_R(served.model, [5, 6, 7 + i], result.token_ids.tolist())
        np.testing.assert_allclose(result.logprobs, own, atol=1e-3)


@pytest.mark.asyncio(loop_scope="session")
@real
async def test_somebody_else_may_ask_for_more_log_probabilities(served: EngineUnderTest) -> None:
    """The columns of a step are those of the request that wants most."""
    pool = served.engine
    assert isinstance(pool, EnginePool)
    (engine,) = pool.engines
    assert engine.server is not None
    calls = [asyncio.create_task(pool.generate([5, 6, 7 + i], SamplingParams(300))) for i in (0, 1)]
    await asyncio.sleep(0.1)
    body = {"token_ids": [3, 4, 5], "sampling_params": {"max_tokens": 3, "logprobs": 5}}
    async with httpx.AsyncClient(timeout=60) as client:
        (
            await client.post(f"{engine.server.url}/inference/v1/generate", json=body)
        ).raise_for_status()
    for i, call in enumerate(calls):
        result = await call
        assert result.logprobs is not None
        own = logprobs_R(served.model, [5, 6, 7 + i], result.token_ids.tolist())
        np.testing.assert_allclose(result.logprobs, own, atol=1e-3)
