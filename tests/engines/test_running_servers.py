"""Servers that run already, which agentrl neither starts nor ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from engines.test_pool import running
from engines.tiny import build_model, greedy, source_of
from transformers import PreTrainedModel

from agentrl.config import Config, EngineConfig
from agentrl.engines.factory import make_engine
from agentrl.engines.pool import EnginePool
from agentrl.types import SamplingParams

PROMPT = list(range(3, 60))
PAUSES = {"vllm": "/pause?mode=keep", "sglang": "/pause_generation"}
kinds = pytest.mark.parametrize("kind", ["vllm", "sglang"])


@asynccontextmanager
async def server(kind: str, model_folder: Path, run_dir: Path) -> AsyncIterator[str]:
    """The address of a server that somebody started."""
    async with running(f"fake-{kind}", model_folder, run_dir) as pool:
        (engine,) = pool.engines
        assert engine.server is not None
        yield engine.server.url


def pool_of(kind: str, url: str, model_folder: Path, run_dir: Path) -> EnginePool:
    section = EngineConfig(
        kind=kind,  # type: ignore[arg-type]
        urls=(url,),
        max_model_len=512,
        transport="gloo",
        request_timeout=10,
    )
    config = Config(agent="agent.py", engine=section)  # type: ignore[arg-type]
    pool = make_engine(config, run_dir=run_dir, model_folder=model_folder)
    assert isinstance(pool, EnginePool)
    return pool


async def greedy_tokens(pool: EnginePool) -> list[int]:
    """What a new run of the servers gets from them."""
    try:
        await pool.start()
        result = await pool.generate(PROMPT, SamplingParams(8, temperature=0))
    finally:
        await pool.close()
    tokens: list[int] = result.token_ids.tolist()
    return tokens


@kinds
async def test_a_server_that_a_killed_run_left_paused_goes_on(
    kind: str, models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    async with server(kind, model_folder, tmp_path) as url:
        async with httpx.AsyncClient() as client:
            await client.post(url + PAUSES[kind], json={"mode": "retract"})
        said = await greedy_tokens(pool_of(kind, url, model_folder, tmp_path))
        assert said == greedy(models[0], PROMPT, 8)


@kinds
async def test_a_server_that_others_may_ask_too_is_always_told_to_pause(
    kind: str, model_folder: Path, tmp_path: Path
) -> None:
    async with server(kind, model_folder, tmp_path) as url:
        pool = pool_of(kind, url, model_folder, tmp_path)
        try:
            await pool.start()
            await pool.pause("keep")
            await pool.resume()
        finally:
            await pool.close()
        async with httpx.AsyncClient() as client:
            asked = (await client.get(f"{url}/fake/requests")).json()
        assert asked.count(PAUSES[kind].partition("?")[0]) == 1


async def push_and_die(kind: str, url: str, folder: Path) -> None:
    """A learner that is killed when it has brought its weights to a server."""
    pool = pool_of(kind, url, folder / "model", folder)
    await pool.start()
    await pool.update_weights(source_of(build_model(1), 1))
    os._exit(9)


@kinds
async def test_a_learner_takes_over_from_one_that_was_killed(
    kind: str, models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    """The server is still in the process group of the one before."""
    (tmp_path / "model").symlink_to(model_folder)
    async with server(kind, model_folder, tmp_path) as url:
        for _ in range(2):
            command = [sys.executable, "-m", "engines.test_running_servers", kind, url, tmp_path]
            died = await asyncio.to_thread(
                subprocess.run,
                list(map(str, command)),
                env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
                capture_output=True,
                text=True,
            )
            assert died.returncode == 9, died.stderr
        said = await greedy_tokens(pool_of(kind, url, model_folder, tmp_path))
        assert said == greedy(models[1], PROMPT, 8)


if __name__ == "__main__":
    asyncio.run(push_and_die(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
