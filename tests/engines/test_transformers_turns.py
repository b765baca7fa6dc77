"""Turns of an episode on the embedded engine, cut in two by an abort or by new weights."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import numpy as np
from chat_formats import make_tokenizer
from embedded_models import build, prompt, response_logprobs, serving, until_sampled
from torch import Tensor

from agentrl import Observation
from agentrl.chat import ChatFormat
from agentrl.engines.base import WeightSource
from agentrl.executors.llm import LLM
from agentrl.types import Generation, SamplingParams

CHAT = ChatFormat(make_tokenizer("chatml"))
VOCAB = len(CHAT.tokenizer)


async def test_an_aborted_turn_that_new_weights_finish_stays_exact() -> None:
    """slime#1440: aborted after some tokens, resumed for the rest; every array is as long."""
    old, new = build(seed=0, vocab_size=VOCAB), build(seed=1, vocab_size=VOCAB)
    sampling = SamplingParams(max_new_tokens=40, temperature=0.6)
    async with serving(build(seed=0, vocab_size=VOCAB)) as engine:
        llm = LLM(engine, CHAT, sampling, max_turns=4, max_tokens=200, rollout_id="r", seed=3)
        conversation = llm.conversation(Observation("Guess."))
        context = conversation.token_ids
        turn = asyncio.create_task(llm.generate(context))
        await until_sampled(engine, 2)
        await engine.pause("abort")
        await engine.update_weights(WeightSource(lambda: new.named_parameters(), 1))
        await engine.resume()
        conversation.take(await turn)
    (sequence,) = conversation.sequences()
    mask = sequence.response_mask
    ids, versions = sequence.token_ids[mask], sequence.weight_versions[mask]
    first = int((versions == 0).sum())
    assert 2 <= first < len(ids)
    assert versions.tolist() == [0] * first + [1] * (len(ids) - first)
    assert len(sequence.turns) == 1
    whole = Generation(ids, None, versions, "stop")
    for model, part in ((old, slice(None, first)), (new, slice(first, None))):
        plain = response_logprobs(model, context, whole, 0.6)
        np.testing.assert_allclose(sequence.logprobs[mask][part], plain[part], atol=1e-4)


async def test_resuming_in_the_middle_of_an_update_samples_nothing_until_it_is_over() -> None:
    """open-instruct PR#1480, slime PR#2331: sampling went on from half of the new weights."""
    new = build(seed=1)
    drawing, go_on = threading.Event(), threading.Event()

    def slow() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in new.named_parameters():
            yield name, tensor
            drawing.set()
            go_on.wait(30)

    ids, params = prompt(20), SamplingParams(max_new_tokens=60, seed=3)
    async with serving() as engine:
        request = asyncio.create_task(engine.generate(ids, params))
        await until_sampled(engine, 5)
        await engine.pause("keep")
        updating = asyncio.create_task(engine.update_weights(WeightSource(slow, 1)))
        await asyncio.to_thread(drawing.wait, 30)
        engine.stats()
        resuming = asyncio.create_task(engine.resume())
        await asyncio.sleep(0.05)
        assert not updating.done()
        assert engine.stats()["sampled_tokens"] == 0
        assert engine.weight_version == 0
        go_on.set()
        await asyncio.gather(updating, resuming)
        out = await request
    change = out.weight_versions.tolist().index(1)
    assert out.weight_versions.tolist() == [0] * change + [1] * (60 - change)
    by_new = response_logprobs(new, ids, out)
    np.testing.assert_allclose(out.logprobs[change:], by_new[change:], atol=1e-4)
