"""sglang-router before two servers: it places requests, all else reaches both servers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from engines.conftest import SCRIPT, server_config
from engines.tiny import greedy, source_of
from pydantic import ValidationError
from transformers import PreTrainedModel

from agentrl.config import Config, EngineConfig
from agentrl.engines.factory import make_engine
from agentrl.engines.launch import sglang_launch
from agentrl.engines.pool import EnginePool
from agentrl.engines.server import EngineServer, free_port
from agentrl.types import SamplingParams

PROMPT = list(range(3, 60))
GREEDY = SamplingParams(8, temperature=0)
LONG = SamplingParams(400, temperature=2.0)


def router_command(python: str, urls: list[str], port: int) -> list[str]:
    options = ["--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls]
    options += ["--policy", "manual", "--assignment-mode", "min_load", "--log-level", "warn"]
    options += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
    return [python, "-m", "sglang_router.launch_router", *options]


def router_python() -> str:
    """The Python of the router's own environment."""
    command = [sys.executable, str(SCRIPT), "router"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.strip()


@asynccontextmanager
async def behind_a_router(model_folder: Path, run_dir: Path) -> AsyncIterator[EnginePool]:
    """Two servers that run already, a router before them, and the pool that knows all three."""
    python = router_python()
    section = server_config("fake-sglang").engine
    launch = sglang_launch(section, str(model_folder), dtype="float32", max_model_len=512)
    async with AsyncExitStack() as stack:
        urls: list[str] = []

        async def start(name: str, command: Any, env: Any = None) -> str:
            log = run_dir / f"{name}.log"
            server = EngineServer(command, name=name, log_path=log, env=env, start_timeout=120)
            await server.start()
            stack.push_async_callback(server.stop)
            return server.url

        for index in range(2):
            urls.append(await start(f"server-{index}", launch.with_port, launch.env))
        router_url = await start("router", lambda port: router_command(python, urls, port))
        config = Config(
            agent="agent.py",  # type: ignore[arg-type]
            engine=EngineConfig(
                kind="sglang",
                urls=tuple(urls),
                router_url=router_url,
                max_model_len=512,
                transport="gloo",
                bucket_mb=1,
            ),
        )
        pool = make_engine(config, run_dir=run_dir, model_folder=model_folder)
        assert isinstance(pool, EnginePool)
        stack.push_async_callback(pool.close)
        await pool.start()
        yield pool


async def seen(pool: EnginePool) -> list[list[dict[str, Any]]]:
    """What each server was asked for, in the order of the servers."""
    async with httpx.AsyncClient() as client:
        answers = [await client.get(f"{engine.label}/fake/generated") for engine in pool.engines]
    return [[entry["body"] for entry in answer.json()] for answer in answers]


@pytest.mark.engine
async def test_requests_go_where_their_group_is_cached_and_weights_to_every_server(
    models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    async with behind_a_router(model_folder, tmp_path) as pool:
        await pool.update_weights(source_of(models[1], 1))
        already = [len(bodies) for bodies in await seen(pool)]

        async def episode(group: int, member: int) -> None:
            context = [group + 3, *PROMPT]
            for turn in range(3):
                result = await pool.generate(
                    context, GREEDY, rollout_id=f"{group}-{member}", group_id=f"{group}"
                )
                assert result.token_ids.tolist() == greedy(models[1], context, 8)
                assert set(result.weight_versions.tolist()) == {1}
                # of all but the last of the context, whole pages of 16
                whole_pages = (len(context) - 24) // 16 * 16
                assert result.cached_tokens >= (whole_pages if turn else 0)
                context += [*result.token_ids.tolist(), *range(10, 26)]

        await asyncio.gather(*(episode(g, m) for g in range(6) for m in range(2)))
        bodies = [entries[n:] for entries, n in zip(await seen(pool), already, strict=True)]
        homes = {group: Counter[int]() for group in range(6)}
        for server, entries in enumerate(bodies):
            for body in entries:
                homes[body["input_ids"][0] - 3][server] += 1
                assert body["return_logprob"]
        assert len({body["extra_key"] for entries in bodies for body in entries}) == 1
        assert all(len(home) == 1 and home.total() == 6 for home in homes.values())
        assert all(bodies), "one of the servers got nothing to do"


@pytest.mark.engine
async def test_a_pause_and_a_cancellation_reach_the_server_that_has_the_request(
    models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    async with behind_a_router(model_folder, tmp_path) as pool:
        calls = [
            asyncio.create_task(pool.generate(PROMPT, LONG, rollout_id=f"r{i}")) for i in range(4)
        ]
        await asyncio.sleep(0.2)
        calls[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await calls[0]
        await pool.pause("abort")
        parts = await asyncio.gather(*calls[1:])
        assert {part.finish_reason for part in parts} == {"abort"}
        assert all(0 < len(part.token_ids) < 400 for part in parts)
        await pool.resume()
        # an update while requests are in flight: they go on under the new weights
        held = asyncio.create_task(pool.generate(PROMPT, SamplingParams(100), rollout_id="held"))
        await asyncio.sleep(0.2)
        await pool.update_weights(source_of(models[1], 7))
        assert {0, 7} == set((await held).weight_versions.tolist())
        result = await asyncio.wait_for(pool.generate(PROMPT, GREEDY), 60)
        assert result.token_ids.tolist() == greedy(models[1], PROMPT, 8)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "vllm", "urls": ["http://a:1"]}, "works with sglang only"),
        ({"kind": "transformers"}, "engine.router_url would be ignored"),
        ({"kind": "sglang"}, "needs engine.urls"),
        ({"kind": "sglang", "urls": ["http://r:1/"]}, "engine.urls names the router"),
        ({"kind": "sglang", "urls": ["http://a:1"], "data_parallel_size": 2}, "drops the replica"),
    ],
)
def test_a_router_that_cannot_work_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        EngineConfig(router_url="http://r:1", **settings)


def test_experts_cannot_be_asked_for_through_the_router() -> None:
    engine = {"kind": "sglang", "urls": ["http://a:1"], "router_url": "http://r:1"}
    with pytest.raises(ValidationError, match="a field that sglang-router drops"):
        Config(agent="a.py", engine=engine, rollout={"router_replay": True})  # type: ignore[arg-type]


def test_an_address_without_a_scheme_is_refused() -> None:
    with pytest.raises(ValidationError, match="write it as http://HOST:PORT"):
        EngineConfig(kind="sglang", urls=("http://a:1",), router_url="r:30000")
