"""The first of a group has the prompt computed; the others are sent when that is done."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from engines.conftest import server_config
from engines.fake.fake_server import PAGE
from engines.test_loans import Loans
from engines.test_pool import kill_and_wait, running
from engines.tiny import greedy, source_of
from pydantic import ValidationError
from transformers import PreTrainedModel

from agentrl.engines.lender import Answered
from agentrl.engines.pool import EnginePool
from agentrl.engines.siblings import Sibling, Siblings
from agentrl.errors import EngineError
from agentrl.types import SamplingParams

PROMPT = list(range(3, 60))
COMPUTED = (len(PROMPT) - 1) // PAGE * PAGE
"""Tokens of the prompt that the server finds afterwards."""
GREEDY = SamplingParams(8, temperature=0)
MEMBERS = 6


async def generated(pool: EnginePool) -> list[dict[str, Any]]:
    """Each request for tokens that the server has had, oldest first, but the one of its start."""
    (engine,) = pool.engines
    assert engine.server is not None
    async with httpx.AsyncClient() as client:
        entries = (await client.get(f"{engine.server.url}/fake/generated")).json()
    return [entry["body"] for entry in entries][1:]


def computes_only(body: dict[str, Any]) -> bool:
    return bool(body["sampling_params"]["max_new_tokens"] == 0)


async def test_others_wait_for_the_first_and_for_no_other_group() -> None:
    siblings = Siblings()
    first = await siblings.join("a")
    waiting = asyncio.create_task(siblings.join("a"))
    assert first.first
    assert (await siblings.join("b")).first
    await asyncio.sleep(0)
    assert not waiting.done()
    with first:
        first.computed = True
    assert not (await waiting).first
    assert not (await siblings.join("a")).first


async def test_of_those_that_wait_one_takes_the_place_of_a_first_that_ended() -> None:
    siblings = Siblings()
    with await siblings.join("a"):
        waiting = [asyncio.create_task(siblings.join("a")) for _ in range(3)]
        await asyncio.sleep(0)
    done, others = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    (second,) = (task.result() for task in done)
    assert second.first
    await asyncio.sleep(0)
    assert not any(task.done() for task in others)
    with second:
        second.computed = True
    assert not any(sibling.first for sibling in await asyncio.gather(*others))


@pytest.mark.parametrize("borrowed", [False, True], ids=["ours", "of another process"])
async def test_a_prompt_is_computed_once_for_its_group(
    model_folder: Path, tmp_path: Path, models: list[PreTrainedModel], borrowed: bool
) -> None:
    async with running(
        "fake-sglang", model_folder, tmp_path, shared_prefill_tokens=len(PROMPT)
    ) as pool:
        engine = Loans(pool).engine if borrowed else pool

        async def sample(member: int) -> Any:
            return await engine.generate(PROMPT, GREEDY, rollout_id=f"g-{member}", group_id="g")

        results = await asyncio.gather(*map(sample, range(MEMBERS)))
        await asyncio.sleep(0.05)  # until a lender has heard of the answers
        stats = pool.stats()
        bodies = await generated(pool)
        if borrowed:
            await engine.close()
    for result in results:
        assert result.token_ids.tolist() == greedy(models[0], PROMPT, 8)
        assert result.logprobs is not None
    # The first counts as having computed the prompt, though its own request found it.
    assert [result.cached_tokens for result in results] == [0] + [COMPUTED] * (MEMBERS - 1)
    assert stats["requests"] == MEMBERS
    assert stats["cached_tokens"] == COMPUTED * (MEMBERS - 1)
    assert [computes_only(body) for body in bodies] == [True] + [False] * MEMBERS
    assert all(body["input_ids"] == PROMPT for body in bodies)
    assert len({body["extra_key"] for body in bodies}) == 1


async def test_who_is_alone_or_has_little_to_share_is_sent_at_once(
    model_folder: Path, tmp_path: Path
) -> None:
    async with running("fake-sglang", model_folder, tmp_path, shared_prefill_tokens=40) as pool:
        await asyncio.gather(
            pool.generate(PROMPT, GREEDY, rollout_id="alone"),
            *(pool.generate(PROMPT[:39], GREEDY, group_id="short") for _ in range(2)),
        )
        assert not any(map(computes_only, await generated(pool)))


async def test_new_weights_make_a_group_compute_its_prompt_again(
    model_folder: Path, tmp_path: Path, models: list[PreTrainedModel]
) -> None:
    async with running("fake-sglang", model_folder, tmp_path, shared_prefill_tokens=40) as pool:
        for version in (1, 2):
            for _ in range(2):
                await pool.generate(PROMPT, GREEDY, group_id="g")
            await pool.update_weights(source_of(models[version - 1], version))
        bodies = await generated(pool)
    assert [computes_only(body) for body in bodies] == [True, False, False] * 2


async def test_a_first_that_fails_or_is_cancelled_leaves_its_place_to_another(
    model_folder: Path, tmp_path: Path
) -> None:
    async with running(
        "fake-sglang", model_folder, tmp_path, shared_prefill_tokens=40, pause_mode="abort"
    ) as pool:
        (engine,) = pool.engines
        assert engine.server is not None
        async with httpx.AsyncClient() as client:
            broken = {"path": "/generate", "answer": {"meta_info": None}}
            await client.post(f"{engine.server.url}/fake/fail", json=broken)
        calls = [
            asyncio.create_task(pool.generate(PROMPT, GREEDY, group_id="g")) for _ in range(MEMBERS)
        ]
        first, *others = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(first, EngineError)
        assert [answer.cached_tokens for answer in others] == [0] + [COMPUTED] * (MEMBERS - 2)  # type: ignore[union-attr]

        await engine.pause("wait")
        calls = [
            asyncio.create_task(pool.generate(PROMPT[::-1], GREEDY, group_id="h"))
            for _ in range(MEMBERS)
        ]
        await asyncio.sleep(0.05)
        calls[0].cancel()
        await engine.resume()
        _, *others = await asyncio.gather(*calls, return_exceptions=True)
        assert [answer.cached_tokens for answer in others] == [0] + [COMPUTED] * (MEMBERS - 2)  # type: ignore[union-attr]


async def test_a_pause_waits_for_no_prompt_and_nothing_is_sampled_in_it(
    model_folder: Path, tmp_path: Path, models: list[PreTrainedModel]
) -> None:
    async with running("fake-sglang", model_folder, tmp_path, shared_prefill_tokens=40) as pool:
        loans = Loans(pool, held=(Answered,))
        calls = [
            asyncio.create_task(loans.engine.generate(PROMPT, GREEDY, group_id="g"))
            for _ in range(MEMBERS)
        ]
        await asyncio.wait_for(loans.waits.wait(), 30)  # the prompt's answer is on its way
        await asyncio.wait_for(pool.pause("keep"), 10)
        loans.let_go()
        await asyncio.sleep(0.1)
        assert [computes_only(body) for body in await generated(pool)] == [True]
        await pool.resume()
        for result in await asyncio.gather(*calls):
            assert result.token_ids.tolist() == greedy(models[0], PROMPT, 8)
        await loans.engine.close()


async def test_all_of_a_group_hear_that_the_server_of_their_prompt_is_dead(
    model_folder: Path, tmp_path: Path
) -> None:
    async with running(
        "fake-sglang", model_folder, tmp_path, shared_prefill_tokens=40, max_restarts=0
    ) as pool:
        loans = Loans(pool, held=(Answered,))
        calls = [
            asyncio.create_task(loans.engine.generate(PROMPT, GREEDY, group_id="g"))
            for _ in range(MEMBERS)
        ]
        await asyncio.wait_for(loans.waits.wait(), 30)
        await kill_and_wait(pool.engines[0])
        loans.let_go()
        answers = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 60)
        assert all(isinstance(answer, EngineError) for answer in answers)
        assert loans.lender.num_open == 0
        await loans.engine.close()


def test_only_sglang_needs_it() -> None:
    assert server_config("fake-sglang").engine.shared_prefill_tokens == 1024
    with pytest.raises(ValidationError, match="vllm, which finds prompts"):
        server_config("fake-vllm", shared_prefill_tokens=100)


def test_a_sibling_that_nobody_waits_for_is_a_plain_context() -> None:
    with Sibling() as sibling:
        assert not sibling.first
