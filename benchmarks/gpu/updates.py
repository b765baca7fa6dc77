"""What the benchmarks of weights share: seconds of an update, and whether an engine then says what
the learner's model says."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.engines.base import Engine
from agentrl.types import Generation, SamplingParams

__all__ = ["DEVICE", "greedy_agreement", "logprob_difference", "make_peaked", "timed"]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 64, 24
CLEAR = 1.0


async def timed(call: Callable[[], Awaitable[object]]) -> float:
    """Seconds of one call, with what the GPU was asked to do."""
    torch.get_device_module(DEVICE).synchronize()
    began = time.perf_counter()
    await call()
    torch.get_device_module(DEVICE).synchronize()
    return time.perf_counter() - began


def make_peaked(model: PreTrainedModel) -> None:
    """Spread the logits, so that a wrong weight anywhere shows in the log-probabilities."""
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head.mul_(4.0)


async def answers(
    engine: Engine, model: PreTrainedModel, params: SamplingParams, seed: int
) -> list[tuple[Generation, Tensor]]:
    """What the engine says after a few prompts, with the model's logits [N, V] for its tokens."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 150_000, PROMPT_TOKENS).tolist() for _ in range(PROMPTS)]
    said = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
    found = []
    for prompt, answer in zip(prompts, said, strict=True):
        ids = torch.tensor([prompt + answer.token_ids.tolist()], device=DEVICE)
        with torch.no_grad():
            found.append((answer, model(ids).logits[0, PROMPT_TOKENS - 1 : -1].float().cpu()))
    return found


async def greedy_agreement(engine: Engine, model: PreTrainedModel) -> dict[str, float]:
    """Share of the engine's greedy tokens that are the model's first choice after the same ids.

    Of all, and of those (`clear_choices`) where the model prefers its first to its second choice by
    more than `CLEAR` nats: the others are near ties, which bfloat16 decides either way.
    """
    params = SamplingParams(NEW_TOKENS, min_new_tokens=NEW_TOKENS, temperature=0, logprobs=False)
    agreed, clear = [], []
    for answer, logits_NV in await answers(engine, model, params, seed=7):
        best = logits_NV.topk(2)
        agreed.append(best.indices[:, 0].numpy() == answer.token_ids)
        clear.append((best.values[:, 0] - best.values[:, 1] > CLEAR).numpy())
    agreed_N, clear_N = np.concatenate(agreed), np.concatenate(clear)
    return {
        "greedy_agreement": float(agreed_N.mean()),
        "clear_choices": float(clear_N.mean()),
        "clear_agreement": float(agreed_N[clear_N].mean()),
    }


async def logprob_difference(engine: Engine, model: PreTrainedModel, seed: int) -> float:
    """Mean |engine - model| of the log-probabilities of what the engine samples."""
    params = SamplingParams(NEW_TOKENS, min_new_tokens=NEW_TOKENS)
    found = []
    for answer, logits_NV in await answers(engine, model, params, seed):
        assert answer.logprobs is not None, "they were asked for"
        ids_N1 = torch.from_numpy(answer.token_ids.astype(np.int64))[:, None]
        own_N = logits_NV.log_softmax(-1).gather(1, ids_N1)[:, 0].numpy()
        found.append(np.abs(own_N - answer.logprobs).mean())
    return float(np.mean(found))
