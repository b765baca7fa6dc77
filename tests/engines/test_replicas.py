"""Data-parallel replicas inside one server: each has its own cache and is addressed by itself."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from engines.test_pool import running
from engines.tiny import greedy, source_of
from transformers import PreTrainedModel

from agentrl.config import EngineConfig
from agentrl.engines.launch import sglang_launch, vllm_launch
from agentrl.engines.pool import EnginePool
from agentrl.types import SamplingParams

PROMPT = list(range(3, 60))
GREEDY = SamplingParams(8, temperature=0)


async def replicas_asked(pool: EnginePool, prompt_start: int) -> Counter[int]:
    """How many requests whose prompt begins so each replica of the only server got."""
    (engine,) = pool.engines
    assert engine.server is not None
    async with httpx.AsyncClient() as client:
        entries = (await client.get(f"{engine.server.url}/fake/generated")).json()
    counts: Counter[int] = Counter()
    for entry in entries:
        body = entry["body"]
        if (body.get("token_ids") or body.get("input_ids"))[0] == prompt_start:
            replica = entry["headers"].get("X-data-parallel-rank", body.get("routed_dp_rank"))
            counts[int(replica)] += 1
    return counts


@pytest.mark.parametrize("kind", ["fake-vllm", "fake-sglang"])
async def test_a_group_stays_on_one_replica_and_finds_its_history_there(
    kind: str, models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    async with running(
        kind, model_folder, tmp_path, data_parallel_size=2, transport="disk"
    ) as pool:
        await pool.update_weights(source_of(models[1], 1))

        async def episode(group: int, member: int) -> None:
            context = [group + 60, *PROMPT]
            for turn in range(3):
                result = await pool.generate(
                    context, GREEDY, rollout_id=f"{group}-{member}", group_id=f"{group}"
                )
                assert result.token_ids.tolist() == greedy(models[1], context, 8)
                whole_pages = (len(context) - 24) // 16 * 16
                assert result.cached_tokens >= (whole_pages if turn else 0)
                context += [*result.token_ids.tolist(), *range(10, 26)]

        await asyncio.gather(*(episode(g, m) for g in range(4) for m in range(2)))
        asked = [await replicas_asked(pool, group + 60) for group in range(4)]
        assert all(len(replicas) == 1 and replicas.total() == 6 for replicas in asked)
        assert sum(asked, Counter()) == {0: 12, 1: 12}


@pytest.mark.parametrize("size", [1, 2])
async def test_replicas_are_paused_also_when_they_have_no_requests(
    size: int, model_folder: Path, tmp_path: Path
) -> None:
    """Those of a mixture of experts compute together until all have seen that nothing is left."""
    async with running("fake-vllm", model_folder, tmp_path, data_parallel_size=size) as pool:
        await pool.pause("keep")
        await pool.resume()
        (server,) = (engine.server for engine in pool.engines)
        assert server is not None
        async with httpx.AsyncClient() as client:
            asked = (await client.get(f"{server.url}/fake/requests")).json()
        assert (asked.count("/pause"), asked.count("/resume")) == (size - 1, size - 1)


@pytest.mark.parametrize("size", [1, 2])
def test_servers_are_started_with_their_replicas(size: int, tmp_path: Path) -> None:
    shared: dict[str, Any] = {"dtype": "float32", "max_model_len": 64}
    vllm = vllm_launch(
        EngineConfig(kind="vllm", data_parallel_size=size), "m", plugin=tmp_path, **shared
    ).with_port(1)
    sglang = sglang_launch(
        EngineConfig(kind="sglang", data_parallel_size=size), "m", **shared
    ).with_port(1)
    for line, flag in ((vllm, "--data-parallel-size"), (sglang, "--dp-size")):
        assert ("--api-server-count" in line) == (size == 2 and line is vllm)
        assert (line[line.index(flag) + 1] if flag in line else "1") == str(size)
