"""The engine's own limit: `episodes.Workload` sampled inside the engine's process, without agentrl.

Runs under the engine's Python. `rollout.py` starts it; alone:

    printf '[0, false]\\n[1, false]\\n' | PYTHON benchmarks/gpu/in_process.py \\
        '{"kind": "vllm", "model": "FOLDER", "options": {}, "workload": {}}' RESULT_FILE

Each line of standard input asks for one round, with a seed of its prompts and whether
log-probabilities are wanted, until the input ends. The file, which may be a pipe, gets a line of
JSON when the engine is ready and one with the sampled tokens per second of each round; what the
engine prints stays out of it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TextIO

from episodes import Workload

Sample = Callable[[list[int], str, bool], Awaitable[list[int]]]
Close = Callable[[], None]


async def episode(
    sample: Sample, workload: Workload, group: int, member: int, seed: int, logprobs: bool
) -> int:
    """One episode; the number of sampled tokens."""
    context = workload.prompt_ids(group, seed)
    sampled = 0
    for turn, feedback in enumerate(workload.feedback_ids(group, member)):
        ids = await sample(context, f"{seed}-{group}-{member}-{turn}-{logprobs}", logprobs)
        sampled += len(ids)
        context = context + ids + feedback
    return sampled


async def rate(sample: Sample, workload: Workload, seed: int, logprobs: bool) -> float:
    """Sampled tokens per second of all episodes at once."""
    began = time.perf_counter()
    counts = await asyncio.gather(
        *(
            episode(sample, workload, group, member, seed, logprobs)
            for group in range(workload.groups)
            for member in range(workload.members)
        )
    )
    if sum(counts) != workload.tokens_sampled:
        raise RuntimeError(f"{sum(counts)} tokens were sampled, not {workload.tokens_sampled}")
    return sum(counts) / (time.perf_counter() - began)


async def vllm_sampler(
    model: str, options: dict[str, Any], workload: Workload
) -> tuple[Sample, Close]:
    """An AsyncLLM."""
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **options))
    gc.collect()
    gc.freeze()  # as its servers do

    async def sample(prompt: list[int], name: str, logprobs: bool) -> list[int]:
        params = SamplingParams(
            max_tokens=workload.sampled,
            ignore_eos=True,
            detokenize=False,
            logprobs=0 if logprobs else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        async for output in engine.generate({"prompt_token_ids": prompt}, params, name):
            last = output
        return list(last.outputs[0].token_ids)

    return sample, engine.shutdown


async def sglang_sampler(
    model: str, options: dict[str, Any], workload: Workload
) -> tuple[Sample, Close]:
    """An sglang.Engine."""
    import sglang

    engine = sglang.Engine(model_path=model, skip_tokenizer_init=False, **options)
    await engine.tokenizer_manager.freeze_gc()  # as agentrl has its servers do
    params = {"max_new_tokens": workload.sampled, "ignore_eos": True}

    async def sample(prompt: list[int], name: str, logprobs: bool) -> list[int]:
        answer = await engine.async_generate(
            input_ids=prompt, sampling_params=params, return_logprob=logprobs, logprob_start_len=-1
        )
        ids: list[int] = answer["output_ids"]
        return ids

    return sample, engine.shutdown


async def serve(call: dict[str, Any], answers: TextIO) -> None:
    """Start the engine and measure what standard input asks for."""
    workload = Workload(**call["workload"])
    make = {"vllm": vllm_sampler, "sglang": sglang_sampler}[call["kind"]]
    sample, close = await make(call["model"], call["options"], workload)
    try:
        print(json.dumps("ready"), file=answers, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            seed, logprobs = json.loads(line)
            found = await rate(sample, workload, seed, logprobs)
            print(json.dumps(found), file=answers, flush=True)
    finally:
        close()


def main() -> None:
    with Path(sys.argv[2]).open("w") as answers:
        asyncio.run(serve(json.loads(sys.argv[1]), answers))


if __name__ == "__main__":
    main()
