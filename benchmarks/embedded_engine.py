"""The embedded engine against transformers' own continuous batching, on the same requests.

64 episodes in groups of 8 start from a prompt that the group shares, with a few tokens of their
own; every turn samples greedily and appends fixed feedback. Both run one after the other in this
process, on one core, with a Llama of 0.2 million random parameters, where the overhead of a step
counts most. The better of `--repeat` runs is taken, and every sampled token must agree.

`computed` counts the tokens that went through the model; `reused` is the share of prompt tokens
that did not have to, against `possible`: what a cache that keeps every prefix would save.

    python benchmarks/embedded_engine.py [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from agentrl.engines.transformers import TransformersEngine
from agentrl.types import SamplingParams

GROUPS, MEMBERS, TURNS = 8, 8, 3
SHARED, OWN, FEEDBACK, RESPONSE = 48, 16, 16, 32
VOCAB = 256


@dataclass(slots=True)
class Run:
    """One engine's way through all episodes; times in seconds, counts in tokens."""

    contexts: list[list[int]]
    seconds: float
    computed: int
    prompts: int

    @property
    def sampled(self) -> int:
        """Tokens sampled."""
        return GROUPS * MEMBERS * TURNS * RESPONSE

    @property
    def reused(self) -> float:
        """Share of prompt tokens that were not computed (padding counts as computed)."""
        # The last sampled token of a turn is computed as part of the next prompt, if ever.
        return 1 - (self.computed - (self.sampled - GROUPS * MEMBERS * TURNS)) / self.prompts


@dataclass(frozen=True, slots=True)
class Result:
    """The figures that are printed."""

    episodes: int
    sampled_tokens: int
    engine_tokens_per_second: float
    transformers_tokens_per_second: float
    ratio: float
    engine_reused: float
    transformers_reused: float
    possible_reused: float
    equal_tokens: bool
    parameters: int


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config).eval()


def episodes() -> tuple[list[list[int]], list[list[list[int]]]]:
    """Prompts, and the feedback after each turn of each episode."""
    rng = np.random.default_rng(0)
    shared = rng.integers(1, VOCAB, (GROUPS, SHARED))
    own = rng.integers(1, VOCAB, (GROUPS * MEMBERS, OWN))
    prompts = np.concatenate([shared.repeat(MEMBERS, axis=0), own], axis=1)
    return prompts.tolist(), rng.integers(1, VOCAB, (len(own), TURNS, FEEDBACK)).tolist()


def possible_reuse() -> float:
    """Share of prompt tokens that no cache needs to compute twice."""
    size, turn = GROUPS * MEMBERS, RESPONSE + FEEDBACK
    prompts = sum(size * (SHARED + OWN + t * turn) for t in range(TURNS))
    first = GROUPS * SHARED + size * OWN
    # Later turns compute the last sampled token and the feedback.
    return 1 - (first + size * (TURNS - 1) * (FEEDBACK + 1)) / prompts


@contextmanager
def counted(model: PreTrainedModel) -> Iterator[Callable[[], int]]:
    """Count the tokens that enter the model."""
    count = 0

    def add(module: torch.nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        nonlocal count
        count += inputs[0].numel()

    hook = model.get_input_embeddings().register_forward_hook(add)
    try:
        yield lambda: count
    finally:
        hook.remove()


def run_engine() -> Run:
    model = build()
    contexts, feedback = episodes()
    params = SamplingParams(max_new_tokens=RESPONSE, temperature=0.0)
    prompts = 0

    async def episode(engine: TransformersEngine, index: int) -> None:
        nonlocal prompts
        for turn in range(TURNS):
            prompts += len(contexts[index])
            out = await engine.generate(contexts[index], params, rollout_id=str(index))
            contexts[index] += out.token_ids.tolist() + feedback[index][turn]

    async def everything() -> float:
        engine = TransformersEngine(model, max_num_seqs=len(contexts), max_model_len=1024)
        await engine.start()
        begin = time.perf_counter()
        await asyncio.gather(*(episode(engine, i) for i in range(len(contexts))))
        seconds = time.perf_counter() - begin
        await engine.close()
        return seconds

    with counted(model) as computed:
        seconds = asyncio.run(everything())
        return Run(contexts, seconds, computed(), prompts)


def run_transformers() -> Run:
    model = build()
    contexts, feedback = episodes()
    turns = [0] * len(contexts)
    prompts = 0
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(
            max_new_tokens=RESPONSE, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=32,
            num_blocks=512,
            max_batch_tokens=512,
            return_logprobs=True,
            use_cuda_graph=False,
            use_async_batching=False,
        ),
    )

    def ask(index: int) -> None:
        nonlocal prompts
        prompts += len(contexts[index])
        manager.add_request(contexts[index], f"{index}-{turns[index]}", RESPONSE)

    with counted(model) as computed:
        manager.start()
        begin = time.perf_counter()
        for index in range(len(contexts)):
            ask(index)
        left = len(contexts) * TURNS
        while left:
            out = manager.get_result(timeout=60)
            if out is None or out.error is not None:
                raise RuntimeError(f"transformers' continuous batching failed: {out}")
            index = int(out.request_id.split("-")[0])
            contexts[index] += out.generated_tokens + feedback[index][turns[index]]
            turns[index] += 1
            left -= 1
            if turns[index] < TURNS:
                ask(index)
        seconds = time.perf_counter() - begin
        manager.stop(block=True)
        return Run(contexts, seconds, computed(), prompts)


def measure(repeat: int) -> Result:
    torch.set_num_threads(1)
    ours, theirs = [], []
    for _ in range(repeat):
        ours.append(run_engine())
        theirs.append(run_transformers())
    best, other = (min(runs, key=lambda run: run.seconds) for runs in (ours, theirs))
    return Result(
        episodes=GROUPS * MEMBERS,
        sampled_tokens=best.sampled,
        engine_tokens_per_second=best.sampled / best.seconds,
        transformers_tokens_per_second=other.sampled / other.seconds,
        ratio=other.seconds / best.seconds,
        engine_reused=best.reused,
        transformers_reused=other.reused,
        possible_reused=possible_reuse(),
        equal_tokens=all(run.contexts == best.contexts for run in (*ours, *theirs)),
        parameters=build().num_parameters(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each; the best counts")
    arguments = parser.parse_args()
    result = measure(arguments.repeat)
    print(f"{'':24}{'tokens/s':>10}{'prompt reused':>16}")
    for name, speed, reused in (
        ("agentrl embedded", result.engine_tokens_per_second, result.engine_reused),
        (
            "transformers batching",
            result.transformers_tokens_per_second,
            result.transformers_reused,
        ),
    ):
        print(f"{name:24}{speed:>10,.0f}{reused:>15.1%}")
    print(f"{'possible':24}{'':10}{result.possible_reused:>15.1%}")
    print(
        f"ratio {result.ratio:.2f}; {result.episodes} episodes, {result.sampled_tokens} tokens, "
        f"sampled tokens {'equal' if result.equal_tokens else 'DIFFER'}"
    )
    if arguments.json:
        print(json.dumps(asdict(result)))
    if not result.equal_tokens:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
