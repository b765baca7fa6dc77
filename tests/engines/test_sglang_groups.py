"""A real SGLang computes few prompts of a group twice, also where all of the group come at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from engines.test_pool import running
from transformers import PreTrainedModel

from agentrl.types import SamplingParams

pytestmark = pytest.mark.engine

GROUPS, MEMBERS, PROMPT = 8, 8, 400  # 25,600 tokens, of which one pass computes 4,096


async def test_members_that_wait_at_once_share_their_prompt(
    models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    prompts = [[3 + (7 * group + i * i) % 100 for i in range(PROMPT)] for group in range(GROUPS)]
    async with (
        running("sglang", model_folder, tmp_path, extra={"chunked_prefill_size": 4096}) as pool,
        httpx.AsyncClient() as client,
    ):
        (engine,) = pool.engines
        assert engine.server is not None
        url = engine.server.url
        # Not by the engine, which would hold the requests back itself.
        await client.post(f"{url}/pause_generation", json={"mode": "retract"})
        calls = [
            asyncio.create_task(pool.generate(prompt, SamplingParams(4, logprobs=False)))
            for prompt in prompts
            for _ in range(MEMBERS)
        ]
        await asyncio.sleep(2.0)  # until they wait there
        await client.post(f"{url}/continue_generation", json={})
        cached = sum(generation.cached_tokens for generation in await asyncio.gather(*calls))
    possible = GROUPS * (MEMBERS - 1) * (PROMPT - 1)
    assert cached > 0.9 * possible
