"""What the trie's tests share: samples that fork, repeat and end inside one another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import strategies as st
from learner_parts import VOCAB, full_logprobs, random_sample, weighted
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from agentrl.train.batch import Sample

Gradients = dict[str, torch.Tensor]


def sample(tokens: list[int], sampled: int = 1) -> Sample:
    """A sequence whose last tokens are sampled."""
    positions = np.arange(len(tokens) - sampled, len(tokens))
    return Sample(np.array(tokens, dtype=np.int32), positions.astype(np.int32))


def forked(seed: int = 0) -> list[Sample]:
    """Two members of a group, a fork of one of them, a repeat, a prefix of another, a stranger."""
    generator = np.random.default_rng(seed)
    prompt = generator.integers(0, VOCAB, 20)

    def after(prefix: np.ndarray, length: int, sampled: int) -> Sample:
        tail = random_sample(generator, length=length, sampled=sampled)
        return replace(
            tail,
            token_ids=np.concatenate([prefix, tail.token_ids]).astype(np.int32),
            positions=(tail.positions + len(prefix)).astype(np.int32),
        )

    first = after(prompt, 9, 4)
    fork = after(first.token_ids[:26], 7, 3)
    repeat = replace(first, advantages=-2 * first.advantages)
    cut = after(first.token_ids[:21], 2, 1)
    cut = replace(cut, token_ids=first.token_ids[:23].copy())
    return [first, after(prompt, 5, 2), fork, repeat, cut, after(prompt[:0], 6, 5)]


@st.composite
def batches(draw: st.DrawFn) -> list[Sample]:
    """Samples over two or three tokens, each of which begins as a part of an earlier one does."""
    vocab = draw(st.integers(2, 3))
    sequences: list[list[int]] = []
    for _ in range(draw(st.integers(1, 8))):
        prefix: list[int] = []
        if sequences and draw(st.booleans()):
            whole = draw(st.sampled_from(sequences))
            prefix = whole[: draw(st.integers(0, len(whole)))]
        tail = draw(st.lists(st.integers(0, vocab - 1), max_size=40))
        sequences.append((prefix + tail + [0, 1])[: max(len(prefix + tail), 2)])
    samples = []
    for tokens in sequences:
        positions = draw(st.sets(st.integers(1, len(tokens) - 1))) | {len(tokens) - 1}
        ids = np.array(tokens, dtype=np.int32)
        samples.append(Sample(ids, np.array(sorted(positions), dtype=np.int32)))
    return samples


def level_llama() -> LlamaForCausalLM:
    """A model whose hidden states keep the size of 1 from the embeddings on.

    A norm over smaller states multiplies the gradient behind it, and its rounding with it.
    """
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
        torch.nn.init.normal_(model.model.embed_tokens.weight)
    return model


def spread(samples: list[Sample]) -> list[Sample]:
    """Give every token an advantage of its own, from -1 to 2.

    Both signs, but more of one: gradients that cancel leave nothing but their rounding.
    """
    advantages = np.linspace(-1, 2, sum(sample.num_sampled for sample in samples))
    ends = np.cumsum([sample.num_sampled for sample in samples])[:-1]
    parts = np.split(advantages, ends)
    given = [s.with_fields(advantages=a) for s, a in zip(samples, parts, strict=True)]
    return weighted([replace(sample, old_logprobs=None) for sample in given])


def separate_gradients(model: PreTrainedModel, samples: list[Sample]) -> Gradients:
    """Of the plain policy gradient by plain torch, one sequence after another."""
    model.zero_grad()
    for sample in samples:
        weights = torch.from_numpy(-sample.advantages * sample.weights)
        (weights * full_logprobs(model, sample)).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def relative_error(found: Gradients, expected: Gradients) -> float:
    """Norm of the difference over all parameters, relative to the norm of what is expected."""
    assert found.keys() == expected.keys()
    difference = torch.cat([(found[name] - expected[name]).flatten() for name in expected])
    return float(difference.norm() / torch.cat([x.flatten() for x in expected.values()]).norm())
