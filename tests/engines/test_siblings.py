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
from agentrl.engines.siblings import Siblings
from agentrl.errors import EngineError
from agentrl.types import Generation, SamplingParams

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


async def tell(pool: EnginePool, where: str, **body: Any) -> None:
    (engine,) = pool.engines
    assert engine.server is not None
    async with httpx.AsyncClient() as client:
        await client.post(f"{engine.server.url}{where}", json=body)


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
    first.settled = True
    first.end()
    assert not (await waiting).first
    assert not (await siblings.join("a")).first


async def test_of_those_that_wait_one_takes_the_place_of_a_first_that_ended() -> None:
    siblings = Siblings()
    first = await siblings.join("a")
    waiting = [asyncio.create_task(siblings.join("a")) for _ in range(3)]
    await asyncio.sleep(0)
    first.end()
    done, others = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    (second,) = (task.result() for task in done)
    assert second.first
    await asyncio.sleep(0)
    assert not any(task.done() for task in others)
    second.settled = True
    second.end()
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


async def test_an_answer_that_cannot_be_read_fails_the_first_alone(
    model_folder: Path, tmp_path: Path
) -> None:
    async with running("fake-sglang", model_folder, tmp_path, shared_prefill_tokens=40) as pool:
        await tell(pool, "/fake/fail", path="/generate", answer={"meta_info": None})
        calls = (pool.generate(PROMPT, GREEDY, group_id="g") for _ in range(MEMBERS))
        first, *others = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(first, EngineError)
        assert all(isinstance(answer, Generation) for answer in others)
        # The others do not try one after another: with a server that hangs each would be as late.
        assert [computes_only(body) for body in await generated(pool)] == [True] + [False] * 5


@pytest.mark.parametrize("how", ["cancelled", "ended early"])
async def test_a_first_that_is_given_up_leaves_its_place_to_another(
    model_folder: Path, tmp_path: Path, how: str
) -> None:
    async with running(
        "fake-sglang",
        model_folder,
        tmp_path,
        shared_prefill_tokens=40,
        extra={"prefill_seconds": 1.0},
    ) as pool:
        calls = [
            asyncio.create_task(pool.generate(PROMPT, GREEDY, group_id="g")) for _ in range(MEMBERS)
        ]
        await asyncio.sleep(0.3)
        if how == "cancelled":
            calls[0].cancel()
        else:
            await tell(pool, "/abort_request", abort_all=True)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        bodies = await generated(pool)
    given_up, *others = (
        None if isinstance(answer, BaseException) else answer.cached_tokens for answer in answers
    )
    assert given_up == (None if how == "cancelled" else 0)
    assert others == [0] + [COMPUTED] * (MEMBERS - 2)
    assert sum(map(computes_only, bodies)) == 2


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
async def test_an_update_that_meets_the_computing_of_a_prompt(
    model_folder: Path, tmp_path: Path, models: list[PreTrainedModel], mode: str
) -> None:
    async with running(
        "fake-sglang",
        model_folder,
        tmp_path,
        shared_prefill_tokens=40,
        pause_mode=mode,
        extra={"prefill_seconds": 0.5},
    ) as pool:
        calls = [
            asyncio.create_task(pool.generate(PROMPT, GREEDY, rollout_id=str(i), group_id="g"))
            for i in range(MEMBERS)
        ]
        await asyncio.sleep(0.2)
        await asyncio.wait_for(pool.update_weights(source_of(models[1], 1)), 30)
        answers = await asyncio.gather(*calls)
        bodies = await generated(pool)
    for answer in answers:
        assert answer.token_ids.tolist() == greedy(models[1], PROMPT, 8)
    # All sample from the new weights, and all but the first and one of the others find its prompt.
    (old, *_), (*_, new) = bodies, bodies
    assert [b["extra_key"] for b in bodies if not computes_only(b)] == [new["extra_key"]] * MEMBERS
    assert old["extra_key"] != new["extra_key"]
    found = [answer.cached_tokens for answer in answers]
    assert sorted(found)[2:] == [COMPUTED] * (MEMBERS - 2)


async def test_a_first_that_is_cancelled_at_the_gate_holds_nobody_up(
    model_folder: Path, tmp_path: Path, models: list[PreTrainedModel]
) -> None:
    async with running(
        "fake-sglang",
        model_folder,
        tmp_path,
        shared_prefill_tokens=40,
        extra={"prefill_seconds": 0.5},
    ) as pool:
        first, second, *others = [
            asyncio.create_task(pool.generate(PROMPT, GREEDY, group_id="g")) for _ in range(MEMBERS)
        ]
        await asyncio.sleep(0.2)
        await pool.pause("abort")  # ends the computing, so that the second takes its place
        await asyncio.sleep(0.1)
        second.cancel()
        await pool.resume()
        for answer in await asyncio.wait_for(asyncio.gather(first, *others), 30):
            assert answer.token_ids.tolist() == greedy(models[0], PROMPT, 8)


async def test_later_turns_wait_for_nobody(model_folder: Path, tmp_path: Path) -> None:
    async with running("fake-sglang", model_folder, tmp_path, shared_prefill_tokens=40) as pool:

        async def two_turns(member: str) -> None:
            place = {"rollout_id": member, "group_id": "g"}
            await pool.generate(PROMPT[:39], GREEDY, **place)
            await pool.generate(PROMPT, GREEDY, **place)
            await pool.generate(PROMPT[::-1], GREEDY, **place)

        await asyncio.gather(*map(two_turns, "abc"))
        assert not any(map(computes_only, await generated(pool)))


async def test_an_emptied_cache_is_filled_anew(model_folder: Path, tmp_path: Path) -> None:
    async with running("fake-sglang", model_folder, tmp_path, shared_prefill_tokens=40) as pool:
        for _ in range(2):
            await pool.generate(PROMPT, GREEDY, group_id="g")
            await pool.flush_cache()
        assert [computes_only(body) for body in await generated(pool)] == [True, False] * 2


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
    assert server_config("fake-sglang").engine.shared_prefill_tokens == 0
    assert server_config("fake-vllm", shared_prefill_tokens=0)
    with pytest.raises(ValidationError, match="vllm, and only sglang"):
        server_config("fake-vllm", shared_prefill_tokens=100)
    off = {"disable_radix_cache": True}
    assert server_config("fake-sglang", extra=dict(off))
    with pytest.raises(ValidationError, match="leaves nothing to share"):
        server_config("fake-sglang", extra=dict(off), shared_prefill_tokens=40)
