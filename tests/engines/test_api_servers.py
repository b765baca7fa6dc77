"""Servers of which several processes read requests and write answers."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from engines.conftest import REAL
from engines.test_pool import running
from engines.tiny import greedy, source_of
from pydantic import ValidationError
from transformers import PreTrainedModel

from agentrl.config import Config, EngineConfig
from agentrl.engines.launch import sglang_launch, vllm_launch
from agentrl.engines.pool import EnginePool
from agentrl.engines.remote import RemoteEngine
from agentrl.types import SamplingParams

PROMPT = list(range(3, 60))
LONG = SamplingParams(400, temperature=2.0)
VITAL = {"vllm": "VLLM::EngineCore", "sglang": "sglang::scheduler"}
RUNNING = {"vllm": "vllm:num_requests_running", "sglang": "sglang:num_running_reqs"}


def url_of(engine: RemoteEngine) -> str:
    assert engine.server is not None
    return engine.server.url


def readers(engine: RemoteEngine) -> set[int]:
    """The processes of the server that have a connection."""
    assert engine.server is not None
    port = httpx.URL(url_of(engine)).port
    family = psutil.Process(engine.server.pid).children(recursive=True)
    return {
        process.pid
        for process in family
        for connection in process.net_connections("tcp")
        if connection.laddr.port == port and connection.status == psutil.CONN_ESTABLISHED
    }


async def until_sampling(engine: RemoteEngine, expected: bool) -> None:
    """Wait until the server says that it samples, or that it does not."""
    name = RUNNING[engine.route.kind]
    async with httpx.AsyncClient() as client:
        for _ in range(600):
            text = (await client.get(f"{url_of(engine)}/metrics")).text
            values = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
            if any(float(value) for value in values) == expected:
                return
            await asyncio.sleep(0.1)
    raise AssertionError(f"the server never said that it samples: {expected}")


async def given_up_requests_end(pool: EnginePool) -> None:
    """At whichever process has them."""
    (engine,) = pool.engines
    engine.stats()
    endless = SamplingParams(400, min_new_tokens=400, temperature=2.0)
    calls = [asyncio.create_task(pool.generate(PROMPT, endless)) for _ in range(16)]
    await until_sampling(engine, True)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    await until_sampling(engine, False)
    assert engine.stats()["cancelled_requests"] == 16
    await asyncio.sleep(4)  # vLLM does not say that they have ended
    await pool.pause("wait")
    await pool.resume()
    assert len((await pool.generate(PROMPT, SamplingParams(4))).token_ids) == 4
    assert engine._strays == {}, "every later update would pause the server for them"


@pytest.mark.parametrize("kind", REAL)
async def test_several_processes_answer_and_weights_change_under_all_of_them(
    kind: str, models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    async with running(kind, model_folder, tmp_path, api_server_count=2) as pool:
        (engine,) = pool.engines
        contexts = [[*PROMPT, 3 + index] for index in range(32)]
        params = SamplingParams(24, temperature=0)

        async def sample() -> list[Any]:
            return await asyncio.gather(*(pool.generate(each, params) for each in contexts))

        for index, version in ((0, 0), (1, 1)):
            if version:
                await pool.update_weights(source_of(models[index], version))
            for context, result in zip(contexts, await sample(), strict=True):
                assert result.token_ids.tolist() == greedy(models[index], context, 24)
                assert set(result.weight_versions.tolist()) == {version}
        assert len(readers(engine)) == 2

        # In flight at both while the weights change: each token is labelled with its own.
        held = [asyncio.create_task(pool.generate(each, LONG)) for each in contexts]
        await asyncio.sleep(1)
        await pool.update_weights(source_of(models[0], 2))
        versions = [(await each).weight_versions.tolist() for each in held]
        assert all(each == sorted(each) and set(each) <= {1, 2} for each in versions)
        assert {each[0] for each in versions} >= {1}
        assert {each[-1] for each in versions} >= {2}

        await given_up_requests_end(pool)


@pytest.mark.slow
@pytest.mark.parametrize("kind", REAL)
async def test_a_server_whose_engine_process_dies_is_replaced(
    kind: str, model_folder: Path, tmp_path: Path
) -> None:
    """Its other processes do not say so, or do not know."""
    async with running(kind, model_folder, tmp_path, api_server_count=2) as pool:
        (engine,) = pool.engines
        assert engine.server is not None
        assert len((await pool.generate(PROMPT, SamplingParams(4))).token_ids) == 4
        await asyncio.sleep(6)  # the supervisor looks for new processes every 5 s
        supervisor = psutil.Process(engine.server.pid)
        family = supervisor.children(recursive=True)
        died = engine.server.died
        next(p for p in family if p.cmdline() and p.cmdline()[0].startswith(VITAL[kind])).kill()
        await asyncio.wait_for(died.wait(), 15)
        await pool.settled()
        assert len((await pool.generate(PROMPT, SamplingParams(4))).token_ids) == 4
        _, left = psutil.wait_procs(family, timeout=10)
        assert left == []


def until_all_are_ready(folder: Path, count: int) -> None:
    """Wait until so many processes of SGLang have said so."""
    log = next(folder.rglob("sglang-0.log"))
    for _ in range(600):
        if log.read_text().count("ready to roll") == count:
            return
        time.sleep(0.2)
    raise AssertionError("some of its processes never became ready")


@pytest.mark.engine
async def test_no_process_of_a_server_that_answers_sends_a_request_of_its_own(
    model_folder: Path, tmp_path: Path
) -> None:
    """SGLang's would, as each becomes ready: into an update, or a server that sleeps."""
    async with running("sglang", model_folder, tmp_path, api_server_count=3) as pool:
        (engine,) = pool.engines
        await asyncio.to_thread(until_all_are_ready, tmp_path, 3)
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"{url_of(engine)}/metrics")).text
        assert "sglang:" in text
        counts = re.findall(r"^sglang:prompt_tokens_total(?:{.*})? (\S+)$", text, re.MULTILINE)
        assert sum(map(float, counts)) < 6, "more than the health checks, of a token each"


@pytest.mark.parametrize("count", [1, 3])
def test_servers_are_started_with_their_processes(count: int, tmp_path: Path) -> None:
    shared: dict[str, Any] = {"dtype": "float32", "max_model_len": 64}
    vllm, sglang = (
        EngineConfig(kind="vllm", api_server_count=count),
        EngineConfig(kind="sglang", api_server_count=count),
    )
    lines = {
        "--api-server-count": vllm_launch(vllm, "m", plugin=tmp_path, **shared).with_port(1),
        "--tokenizer-worker-num": sglang_launch(sglang, "m", **shared).with_port(1),
    }
    for flag, line in lines.items():
        assert (line[line.index(flag) + 1] if flag in line else "1") == str(count)


def test_each_process_of_sglang_gets_connections_of_its_own_where_it_can(tmp_path: Path) -> None:
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").touch()
    known = "enable_http_worker_reuseport: bool = False"
    (tmp_path / "sglang" / "srt" / "server_args.py").write_text(known)

    def line(**settings: Any) -> list[str]:
        config = EngineConfig(kind="sglang", env={"PYTHONPATH": str(tmp_path)}, **settings)
        return list(sglang_launch(config, "m", dtype="float32", max_model_len=64).with_port(1))

    flag = "--enable-http-worker-reuseport"
    assert flag in line(api_server_count=2)
    assert flag not in line(api_server_count=1)
    assert flag not in line(api_server_count=2, extra={"enable_http2": True})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kind": "transformers"}, "engine.api_server_count would be ignored"),
        ({"kind": "vllm", "urls": ["http://a:1"]}, "engine.api_server_count would be ignored"),
        ({"kind": "sglang", "pause_mode": "abort"}, "set pause_mode to keep or wait"),
        ({"kind": "sglang", "api_key": "secret"}, "set api_server_count to 1, or leave"),
        ({"kind": "vllm", "lora": "adapter"}, "or engine.lora to merged"),
    ],
)
def test_where_several_processes_cannot_work_it_says_so(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValidationError, match=said):
        EngineConfig(**settings, api_server_count=2)
    EngineConfig(**settings, api_server_count=1)


@pytest.mark.parametrize("name", ["api-server-count", "tokenizer_worker_num"])
def test_the_servers_own_names_for_it_point_to_the_setting(name: str) -> None:
    with pytest.raises(ValidationError, match=r"use engine\.api_server_count"):
        EngineConfig(kind="vllm", extra={name: 2})


def test_adapters_travel_to_one_process() -> None:
    """vLLM loads adapters at run time with one API server only."""
    model = {"path": "tiny", "lora": {"rank": 8}}
    engine = {"kind": "vllm", "api_server_count": 2}
    with pytest.raises(
        ValidationError, match=r"engine\.api_server_count 2 does not go with a LoRA"
    ):
        Config(agent="agent.py", model=model, engine=engine)  # type: ignore[arg-type]
    merged = engine | {"lora": "merged"}
    Config(agent="agent.py", model=model, engine=merged)  # type: ignore[arg-type]
