"""Requests that another process sends: admitted, paused, ended, explained and counted as if by us.

Both sides live in this process; what they say travels as it would between two.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from engines.conftest import EngineUnderTest
from engines.test_adapter import adapted, serving
from engines.test_pool import kill, running
from engines.tiny import greedy, logprobs_R, source_of
from transformers import PreTrainedModel

from agentrl.engines.base import PauseMode
from agentrl.engines.borrower import BorrowedEngine
from agentrl.engines.http import NoAnswerError, RequestRefusedError
from agentrl.engines.lender import Granted, Lender
from agentrl.engines.pool import EnginePool
from agentrl.errors import ContextOverflowError, EngineError
from agentrl.types import SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="session")
both = pytest.mark.parametrize("served", ["fake-vllm", "fake-sglang"], indirect=True)

PROMPT = list(range(3, 60))
GREEDY = SamplingParams(12, temperature=0)
LONG = SamplingParams(300, temperature=2.0)
PAUSES = {"fake-vllm": "/pause", "fake-sglang": "/pause_generation"}
ABORTS = {"fake-vllm": "/abort_requests", "fake-sglang": "/abort_request"}
TOKENS = {"fake-vllm": "/inference/v1/generate", "fake-sglang": "/generate"}


@dataclass
class Loans:
    """A borrower and its lender; messages of the kinds in `held` wait in `waiting`."""

    pool: EnginePool
    held: tuple[type, ...] = ()
    waiting: list[Callable[[], None]] = field(default_factory=list)
    waits: asyncio.Event = field(default_factory=asyncio.Event)
    said: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        route = pickle.loads(pickle.dumps(self.pool.engines[0].route))
        self.lender = Lender(self.pool, lambda message: self._bring(message, self.engine.take))
        self.engine = BorrowedEngine(route, lambda message: self._bring(message, self.lender.take))

    def let_go(self) -> None:
        self.held = ()
        while self.waiting:
            self.waiting.pop(0)()

    def _bring(self, message: Any, take: Callable[[Any], None]) -> None:
        self.said.append(message)
        copy = pickle.loads(pickle.dumps(message))

        def arrive() -> None:
            if isinstance(copy, self.held) or self.waiting:
                self.waiting.append(lambda: take(copy))
                self.waits.set()
            else:
                take(copy)

        asyncio.get_running_loop().call_soon(arrive)


def loans_of(served: EngineUnderTest) -> Loans:
    assert isinstance(served.engine, EnginePool)
    served.engine.stats()
    return Loans(served.engine)


def url_of(served: EngineUnderTest) -> str:
    assert isinstance(served.engine, EnginePool)
    (engine,) = served.engine.engines
    assert engine.server is not None
    return engine.server.url


async def asked_for(served: EngineUnderTest, path: str) -> int:
    """How often the server was asked for a path."""
    async with httpx.AsyncClient() as client:
        return (await client.get(f"{url_of(served)}/fake/requests")).json().count(path)


@both
async def test_a_borrowed_request_says_what_one_of_our_own_would_say(
    served: EngineUnderTest,
) -> None:
    loans = loans_of(served)
    result = await loans.engine.generate(PROMPT, GREEDY)
    assert result.token_ids.tolist() == greedy(served.model, PROMPT, 12)
    assert result.logprobs is not None
    expected = logprobs_R(served.model, PROMPT, result.token_ids.tolist())
    np.testing.assert_allclose(result.logprobs, expected, atol=1e-4)
    assert set(result.weight_versions.tolist()) == {served.engine.weight_version}
    await loans.engine.close()


@both
async def test_a_borrowed_request_is_counted_once(served: EngineUnderTest) -> None:
    loans = loans_of(served)
    first, second = await asyncio.gather(
        loans.engine.generate(PROMPT, GREEDY), served.engine.generate(PROMPT[:20], GREEDY)
    )
    await asyncio.sleep(0.05)  # until the lender has heard of the answer
    stats = served.engine.stats()
    assert stats["requests"] == 2
    assert stats["prompt_tokens"] == len(PROMPT) + 20
    assert stats["cached_tokens"] == first.cached_tokens + second.cached_tokens
    assert stats["sampled_tokens"] == stats["finish_length"] * 12 == 24
    assert stats["request_latency_p50"] > 0
    assert "requests" not in served.engine.stats()
    await loans.engine.close()


@both
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_every_borrowed_token_says_which_weights_sampled_it(
    served: EngineUnderTest, mode: PauseMode
) -> None:
    loans = loans_of(served)
    before = served.engine.weight_version
    requests = [
        asyncio.create_task(loans.engine.generate(PROMPT[: 20 + i], LONG)) for i in range(4)
    ]
    await asyncio.sleep(0.3)
    if mode != "keep":
        await served.engine.pause(mode)
        await asyncio.wait_for(asyncio.gather(*requests), 10)  # they end while it is paused
        await served.engine.resume()
    after = await served.load(1)
    results = await asyncio.gather(*requests)
    for i, result in enumerate(results):
        prompt, ids = PROMPT[: 20 + i], result.token_ids.tolist()
        assert result.logprobs is not None
        for index, version in ((0, before), (1, after)):
            mine = result.weight_versions == version
            expected = logprobs_R(served.models[index], prompt, ids, 2.0)
            np.testing.assert_allclose(result.logprobs[mine], expected[mine], atol=1e-4)
    changed = [set(r.weight_versions.tolist()) == {before, after} for r in results]
    assert any(changed) if mode == "keep" else not any(changed)
    assert mode != "abort" or {r.finish_reason for r in results} == {"abort"}
    await loans.engine.close()


@both
async def test_a_request_is_not_sent_while_the_engine_is_paused(served: EngineUnderTest) -> None:
    loans = loans_of(served)
    await served.engine.pause("wait")
    request = asyncio.create_task(loans.engine.generate(PROMPT, GREEDY))
    await asyncio.sleep(0.1)
    assert not any(isinstance(message, Granted) for message in loans.said)
    await served.engine.resume()
    assert (await request).token_ids.tolist() == greedy(served.model, PROMPT, 12)
    await loans.engine.close()


@both
@pytest.mark.parametrize("mode", ["keep", "abort"])
async def test_a_server_is_paused_only_when_what_was_admitted_is_written(
    served: EngineUnderTest, mode: PauseMode
) -> None:
    loans = loans_of(served)
    loans.held = (Granted,)
    request = asyncio.create_task(loans.engine.generate(PROMPT, LONG))
    await loans.waits.wait()
    before = await asked_for(served, PAUSES[served.kind])
    pause = asyncio.create_task(served.engine.pause(mode))
    await asyncio.sleep(0.2)
    assert not pause.done()
    assert await asked_for(served, PAUSES[served.kind]) == before
    loans.let_go()
    await pause
    await served.engine.resume()
    result = await request
    assert result.finish_reason == ("abort" if mode == "abort" else "length")
    await loans.engine.close()


@both
async def test_a_server_is_told_to_pause_only_if_it_may_be_at_a_request(
    served: EngineUnderTest,
) -> None:
    route = PAUSES[served.kind]
    before = await asked_for(served, route)
    await served.engine.pause("keep")
    await served.engine.resume()
    await served.load(1)
    assert await asked_for(served, route) == before
    request = asyncio.create_task(served.engine.generate(PROMPT, LONG))
    await asyncio.sleep(0.3)
    request.cancel()  # the server hears of it later
    await asyncio.gather(request, return_exceptions=True)
    await served.engine.pause("wait")
    await served.engine.resume()
    assert await asked_for(served, route) == before + 1
    await served.load(0)
    assert await asked_for(served, route) == before + 1


@both
async def test_a_server_that_did_not_hear_that_a_request_is_over_is_paused_until_it_has(
    served: EngineUnderTest,
) -> None:
    """It would hold the request, go on with it, and be at it when the weights change next."""
    async with httpx.AsyncClient(base_url=url_of(served)) as http:
        await http.post("/fake/fail", json={"path": ABORTS[served.kind]})
    before = await asked_for(served, PAUSES[served.kind])
    request = asyncio.create_task(served.engine.generate(PROMPT, LONG))
    await asyncio.sleep(0.3)
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    for told in (1, 2):
        await served.engine.pause("keep")
        await served.engine.resume()
        assert await asked_for(served, PAUSES[served.kind]) == before + told


@both
async def test_a_request_that_is_given_up_while_the_server_is_told_to_pause_is_not_forgotten(
    served: EngineUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(served.engine, EnginePool)
    (engine,) = served.engine.engines
    before = await asked_for(served, PAUSES[served.kind])
    request = asyncio.create_task(served.engine.generate(PROMPT, LONG))
    await asyncio.sleep(0.3)
    pause = engine._pause

    async def given_up_meanwhile(mode: PauseMode) -> None:
        await pause(mode)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_pause", given_up_meanwhile)
        await engine.pause("keep")
    await engine.resume()
    await engine.pause("keep")
    await engine.resume()
    assert await asked_for(served, PAUSES[served.kind]) == before + 2


async def test_an_update_that_waits_for_a_request_which_nobody_writes_says_so(
    model_folder: Path, models: list[PreTrainedModel], tmp_path: Path
) -> None:
    async with running("fake-vllm", model_folder, tmp_path, update_timeout=0.5) as pool:
        loans = Loans(pool)
        loans.held = (Granted,)  # the borrower's process hangs
        request = asyncio.create_task(loans.engine.generate(PROMPT, GREEDY))
        await loans.waits.wait()
        with pytest.raises(EngineError, match=r"did not pause .* an agent's `async def` blocks"):
            await pool.update_weights(source_of(models[1], 1))
        loans.let_go()
        assert set((await request).weight_versions.tolist()) == {0}
        again = await asyncio.wait_for(loans.engine.generate(PROMPT, GREEDY), 30)
        assert set(again.weight_versions.tolist()) == {0}
        await loans.engine.close()


@both
async def test_condemned_engines_end_what_was_borrowed_and_refuse_more(
    served: EngineUnderTest,
) -> None:
    assert isinstance(served.engine, EnginePool)
    loans = loans_of(served)
    request = asyncio.create_task(loans.engine.generate(PROMPT, LONG))
    await asyncio.sleep(0.1)
    (engine,) = served.engine.engines
    await engine.condemn("its weights are half new")
    with pytest.raises(EngineError, match="given up: its weights are half new"):
        await request
    with pytest.raises(EngineError, match="its weights are half new"):
        await loans.engine.generate(PROMPT, GREEDY)
    assert served.engine.stats()["failed_requests"] == 1
    await served.load(0)
    result = await loans.engine.generate(PROMPT, GREEDY)
    assert result.token_ids.tolist() == greedy(served.model, PROMPT, 12)
    await loans.engine.close()


@both
async def test_giving_up_a_borrowed_request_ends_it_on_the_server(served: EngineUnderTest) -> None:
    loans = loans_of(served)
    requests = [asyncio.create_task(loans.engine.generate(PROMPT, LONG)) for _ in range(2)]
    await asyncio.sleep(0.1)
    abort = {"fake-vllm": "/abort_requests", "fake-sglang": "/abort_request"}[served.kind]
    before = await asked_for(served, abort)
    requests[0].cancel()
    await asyncio.wait({requests[0]})
    loans.lender.close()  # the borrower's process has died
    await asyncio.sleep(0.2)
    assert await asked_for(served, abort) == before + 2
    assert served.engine.stats()["cancelled_requests"] == 2
    with pytest.raises(EngineError, match="given up"):
        await requests[1]
    await loans.engine.close()


@both
async def test_one_that_is_given_up_before_it_is_admitted_leaves_nothing(
    served: EngineUnderTest,
) -> None:
    loans = loans_of(served)
    for steps in range(8):
        request = asyncio.create_task(loans.engine.generate(PROMPT, LONG))
        for _ in range(steps):
            await asyncio.sleep(0)
        request.cancel()
        await asyncio.wait({request})
    await asyncio.sleep(0.1)
    assert loans.lender.num_open == 0
    await asyncio.wait_for(served.engine.pause("wait"), 10)
    await served.engine.resume()
    await loans.engine.close()


@both
@pytest.mark.parametrize("borrowed", [True, False])
@pytest.mark.parametrize("answer", [{}, {"choices": [], "output_ids": [5]}, [], "hello"])
async def test_what_answers_as_no_server_does_is_an_engine_error_and_is_not_waited_for(
    served: EngineUnderTest, borrowed: bool, answer: Any
) -> None:
    loans = loans_of(served)
    engine = loans.engine if borrowed else served.engine
    async with httpx.AsyncClient() as client:
        told = {"path": TOKENS[served.kind], "answer": answer}
        await client.post(f"{url_of(served)}/fake/fail", json=told)
    with pytest.raises(EngineError, match=r"is not that of a (vllm|sglang) server"):
        await engine.generate(PROMPT, GREEDY)
    await asyncio.wait_for(served.engine.pause("wait"), 10)
    await served.engine.resume()
    assert served.engine.stats()["failed_requests"] == 1
    await loans.engine.close()


@both
async def test_what_a_server_would_not_sample_as_asked_is_refused_before_it_is_borrowed(
    served: EngineUnderTest,
) -> None:
    loans = loans_of(served)
    with pytest.raises(ContextOverflowError, match="do not fit"):
        await loans.engine.generate(PROMPT, SamplingParams(10_000))
    with pytest.raises(EngineError, match="outside the model's vocabulary"):
        await loans.engine.generate([100_000], GREEDY)
    assert loans.said == []


async def test_a_server_that_dies_is_said_to_have_died_and_its_successor_is_borrowed(
    models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    async with running("fake-vllm", model_folder, tmp_path) as pool:
        loans = Loans(pool)
        request = asyncio.create_task(loans.engine.generate(PROMPT, LONG))
        await asyncio.sleep(0.2)
        kill(pool.engines[0])
        with pytest.raises(EngineError, match="vllm-0 server ended"):
            await request
        again = await asyncio.wait_for(loans.engine.generate(PROMPT, GREEDY), 120)
        assert again.token_ids.tolist() == greedy(models[0], PROMPT, 12)
        await loans.engine.close()


async def test_a_borrowed_request_is_sent_with_the_adapter_of_its_version(
    models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    async with serving("fake-vllm", model_folder, tmp_path) as pool:
        loans = Loans(pool)
        for version in (1, 2):
            merged, source = adapted(models[0], seed=version, version=version)
            await pool.update_weights(source)
            result = await loans.engine.generate(PROMPT, GREEDY)
            assert result.token_ids.tolist() == greedy(merged, PROMPT, 12)
            assert set(result.weight_versions.tolist()) == {version}
            assert loans.engine.weight_version == version
        await loans.engine.close()


@pytest.mark.parametrize(
    "error", [RequestRefusedError("no", 503), NoAnswerError("late", late=True)]
)
async def test_what_is_known_of_an_error_travels_with_it(error: EngineError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))
