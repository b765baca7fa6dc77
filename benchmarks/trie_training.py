"""Forward and backward over a token trie against the same sequences as padded rows.

`group`: 8 responses of 128 tokens to one prompt of 1,024. `tool_use`: a system prompt with tools of
1,024 tokens, 8 samples of 6 turns, each 64 sampled tokens of which the 32 of the thinking are
dropped from the history, then 48 of feedback: 48 sequences, each turn a fork.

Both ways run the learner's own scorer, head and micro-batches on the same Llama with random
weights, in turn in this process; rows are sorted by length, so that little is padding. Times are
of the processor (one thread), which others on the machine do not change; the median of `--repeat`
runs of each counts. `grad_rel_error` is the norm of the difference of the gradients
over all parameters, relative to the norm of the gradient, in float32 (so that it is the rounding of
both); `grad_rel_error_float64` is the same of a small model in float64.

    python benchmarks/trie_training.py [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from agentrl.train.batch import Sample
from agentrl.train.microbatch import MicroBatch, collate, token_field
from agentrl.train.row_plan import plan_rows
from agentrl.train.scorer import TokenScorer
from agentrl.train.tree_attention import TREE_ATTENTION
from agentrl.train.trie_plan import plan_tries

VOCAB, MAX_TOKENS = 20480, 16384
PROMPT, MEMBERS, RESPONSE = 1024, 8, 128
TURNS, SAMPLED, THINKING, FEEDBACK = 6, 64, 32, 48

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one shape of batch; times in seconds of one core."""

    speedup: float
    grad_rel_error: float
    grad_rel_error_float64: float
    padded_seconds: float
    trie_seconds: float
    sequences: int
    tokens_given: int
    tokens_computed: int
    parameters: int


def build(layers: int, *, hidden: int = 512, vocab: int = VOCAB) -> LlamaForCausalLM:
    """A Llama with 8 heads of which 4 have keys; 60.8 million parameters with 16 layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def group(vocab: int) -> list[Sample]:
    """Responses to one prompt."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, vocab, PROMPT)
    return [
        sample(np.append(prompt, rng.integers(0, vocab, RESPONSE)), RESPONSE, rng)
        for _ in range(MEMBERS)
    ]


def tool_use(vocab: int) -> list[Sample]:
    """One sequence for every turn, since the history before it was rewritten."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, vocab, PROMPT)
    samples = []
    for _ in range(MEMBERS):
        history = prompt
        for _ in range(TURNS):
            turn = rng.integers(0, vocab, SAMPLED)
            samples.append(sample(np.append(history, turn), SAMPLED, rng))
            answer = turn[THINKING:]
            history = np.concatenate([history, answer, rng.integers(0, vocab, FEEDBACK)])
    return samples


def sample(token_ids: Tokens, sampled: int, rng: np.random.Generator) -> Sample:
    """A sequence that ends with its sampled tokens, each with an advantage of its own."""
    positions = np.arange(len(token_ids) - sampled, len(token_ids))
    return Sample(token_ids.astype(np.int32), positions.astype(np.int32)).with_fields(
        advantages=rng.normal(size=sampled)
    )


class Way:
    """One way of going through a batch: as a trie or as rows."""

    def __init__(self, model: LlamaForCausalLM, samples: list[Sample], *, as_trie: bool) -> None:
        model.set_attn_implementation("sdpa")
        self.scorer = TokenScorer(model, temperature=1.0)
        self.attention = TREE_ATTENTION if as_trie else "sdpa"
        vocab, hidden = model.config.vocab_size, model.config.hidden_size
        if as_trie:
            (self.plan,) = plan_tries(
                samples, world_size=1, max_tokens=MAX_TOKENS, vocab_size=vocab,
                token_cost=6 * hidden,
            )  # fmt: skip
        else:
            (self.plan,) = plan_rows(samples, world_size=1, max_tokens=MAX_TOKENS, vocab_size=vocab)
        self.sampled = sum(each.num_sampled for each in samples)
        self.computed = 0

    def run(self) -> float:
        """Leave the batch's gradient in the model; returns the time from samples to gradient."""
        policy = self.scorer.policy
        policy.set_attn_implementation(self.attention)
        policy.zero_grad()
        self.computed = 0
        begin = time.process_time()
        for micro_batch in self.plan:
            self._backward(micro_batch)
        return time.process_time() - begin

    def _backward(self, micro_batch: MicroBatch) -> None:
        device = torch.device("cpu")
        layout = collate(micro_batch, device)
        self.computed += layout.input_ids_BT.numel()
        scores = self.scorer(
            layout.input_ids_BT,
            layout.index_N,
            layout.targets_N,
            head_chunks=micro_batch.head_chunks,
            tree=layout.tree,
        ).expand(layout.expand_R)
        advantages_R = token_field(micro_batch, "advantages", device)
        assert advantages_R is not None, "every sample has advantages"
        (-(scores.logprobs_N * advantages_R).sum() / self.sampled).backward()

    def gradient(self) -> Tensor:
        """All parameters' gradients in one vector."""
        return torch.cat([p.grad.flatten() for p in self.scorer.parameters() if p.grad is not None])


def measure(batch: Callable[[int], list[Sample]], layers: int, repeat: int) -> Result:
    """Run both ways in turn."""
    samples = batch(VOCAB)
    model = build(layers)
    rows, trie = (Way(model, samples, as_trie=as_trie) for as_trie in (False, True))
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(repeat):
        seconds[False].append(rows.run())
        expected = rows.gradient()
        seconds[True].append(trie.run())
        error = (trie.gradient() - expected).norm() / expected.norm()
    padded, shared = (statistics.median(seconds[way]) for way in (False, True))
    return Result(
        speedup=padded / shared,
        grad_rel_error=float(error),
        grad_rel_error_float64=error_in_float64(batch),
        padded_seconds=padded,
        trie_seconds=shared,
        sequences=len(samples),
        tokens_given=sum(each.num_inputs for each in samples),
        tokens_computed=trie.computed,
        parameters=model.num_parameters(),
    )


def error_in_float64(batch: Callable[[int], list[Sample]]) -> float:
    """The error of a model of two layers in double precision (the head stays in float32)."""
    model = build(2, hidden=64, vocab=512).double()
    gradients = []
    for as_trie in (False, True):
        way = Way(model, batch(512), as_trie=as_trie)
        way.run()
        gradients.append(way.gradient())
    return float((gradients[1] - gradients[0]).norm() / gradients[0].norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each; the median counts")
    parser.add_argument("--only", choices=["group", "tool_use"], help="one of the two")
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    shapes = {"group": (group, 16), "tool_use": (tool_use, 8)}
    results = {
        name: measure(batch, layers, arguments.repeat)
        for name, (batch, layers) in shapes.items()
        if arguments.only in (None, name)
    }
    columns = ("padded s", "trie s", "speedup", "given", "computed", "error", "float64", "weights")
    print(f"{'':10}" + "".join(f"{column:>11}" for column in columns))
    for name, result in results.items():
        print(
            f"{name:10}{result.padded_seconds:>11.2f}{result.trie_seconds:>11.2f}"
            f"{result.speedup:>11.2f}{result.tokens_given:>11}{result.tokens_computed:>11}"
            f"{result.grad_rel_error:>11.1e}{result.grad_rel_error_float64:>11.1e}"
            f"{result.parameters / 1e6:>10.1f}M"
        )
    if arguments.json:
        print(json.dumps({name: asdict(result) for name, result in results.items()}))


if __name__ == "__main__":
    main()
