"""A real SGLang and the prompts of groups whose members all come at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest
from engines.test_pool import running

from agentrl.types import SamplingParams

pytestmark = pytest.mark.engine

GROUPS, MEMBERS, PROMPT = 8, 8, 400
ONE_PASS = GROUPS * PROMPT  # tokens: each group's prompt once, or all members of one group


async def test_members_that_wait_at_once_share_their_prompt(
    model_folder: Path, tmp_path: Path
) -> None:
    prompts = [[3 + (7 * group + i * i) % 100 for i in range(PROMPT)] for group in range(GROUPS)]
    async with running(
        "sglang", model_folder, tmp_path, extra={"chunked_prefill_size": ONE_PASS}
    ) as pool:
        (engine,) = pool.engines
        assert engine.server is not None
        (scheduler,) = (
            process
            for process in psutil.Process(engine.server.pid).children(recursive=True)
            if process.cmdline()[0].startswith("sglang::scheduler")
        )
        # A scheduler that sleeps while they come finds most of them when it looks. Held back by
        # /pause_generation they would come one by one afterwards.
        scheduler.suspend()
        try:
            calls = [
                asyncio.create_task(pool.generate(prompt, SamplingParams(4, logprobs=False)))
                for prompt in prompts
                for _ in range(MEMBERS)
            ]
            await asyncio.sleep(3.0)  # until they wait there
        finally:
            scheduler.resume()
        cached = sum(generation.cached_tokens for generation in await asyncio.gather(*calls))
    possible = GROUPS * (MEMBERS - 1) * (PROMPT - 1)
    # All but those that a late leader's pass has room for; few where the first to come is first.
    assert cached > 0.6 * possible


async def test_a_group_computes_its_prompt_once(model_folder: Path, tmp_path: Path) -> None:
    prompts = [[3 + (7 * group + i * i) % 100 for i in range(PROMPT)] for group in range(GROUPS)]
    async with running("sglang", model_folder, tmp_path, shared_prefill_tokens=PROMPT) as pool:
        calls = (
            pool.generate(prompt, SamplingParams(4), group_id=f"group {group}")
            for group, prompt in enumerate(prompts)
            for _ in range(MEMBERS)
        )
        found = [generation.cached_tokens for generation in await asyncio.gather(*calls)]
    assert sorted(found) == [0] * GROUPS + [PROMPT - 1] * GROUPS * (MEMBERS - 1)
