"""What the learner's tests share: small models, samples with known fields, a plain-torch double."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from agentrl.config import Config
from agentrl.train.batch import Sample
from agentrl.types import Sequence, StopReason, Trajectory, Turn

VOCAB = 23


def small_llama(*, tied: bool = True, seed: int = 0) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def make_config(**sections: Any) -> Config:
    return Config(agent=Path("agent.py"), **sections)


def random_sample(generator: np.random.Generator, *, length: int, sampled: int) -> Sample:
    positions = np.sort(generator.choice(np.arange(1, length), sampled, replace=False))
    positions[-1] = length - 1
    return Sample(
        token_ids=generator.integers(0, VOCAB, length).astype(np.int32),
        positions=positions.astype(np.int32),
    ).with_fields(
        advantages=generator.normal(size=sampled),
        old_logprobs=-3.1 + 0.1 * generator.normal(size=sampled),
    )


def weighted(samples: list[Sample]) -> list[Sample]:
    """Every token of all samples counts the same."""
    tokens = sum(sample.num_sampled for sample in samples)
    return [s.with_fields(weights=np.full(s.num_sampled, 1 / tokens)) for s in samples]


def full_logprobs(model: PreTrainedModel, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of the sampled tokens from the logits of the whole sequence, [R]."""
    ids = torch.from_numpy(sample.token_ids).long()
    logits = model(ids.unsqueeze(0)).logits[0, :-1].float() / temperature
    all_logprobs = logits.log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
    return all_logprobs[torch.from_numpy(sample.positions).long() - 1]


def trajectory(
    reward: float | None,
    *,
    group: str = "g",
    turns: tuple[int, ...] = (2, 2),
    turn_rewards: tuple[float | None, ...] | None = None,
    score: float | None = None,
    stop: StopReason = StopReason.DONE,
    seed: int = 0,
    logprobs: bool = True,
) -> Trajectory:
    """An episode in which a prompt of three tokens and two more go before each turn."""
    generator = np.random.default_rng(seed)
    spans, mask = [], [False]
    for index, length in enumerate(turns):
        mask += [False] * 2
        given = turn_rewards[index] if turn_rewards else None
        spans.append(Turn(len(mask), len(mask) + length, "stop", reward=given))
        mask += [True] * length
    mask += [False]
    mask_T = np.array(mask)
    sequence = Sequence(
        token_ids=generator.integers(0, VOCAB, len(mask)),
        response_mask=mask_T,
        logprobs=np.where(mask_T, -3.0, np.nan) if logprobs else None,
        weight_versions=np.where(mask_T, 0, -1),
        turns=tuple(spans),
    )
    return Trajectory((sequence,), reward, stop, group_id=group, score=score)
