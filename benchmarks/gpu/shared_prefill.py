"""What a group's prompt costs on SGLang when it is computed once, and when each member may.

Groups of 8 members come together, 16 groups at a time: the next begins when one has ended. Members
of a group sample as many tokens, groups from 64 to 192. `engine.shared_prefill_tokens` is 1 (the
first of a group has its prompt computed, the others wait) and 0 in turn, on one server, for prompts
of each length; no prompt comes up twice. Medians over rounds after one that warms up.

    python benchmarks/gpu/shared_prefill.py [--shape qwen2.5-1.5b] [--prompts 512 1024 2048 4096]
        [--python PYTHON] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import torch
from episodes import VOCAB
from servers import OPTIONS, server_config, versions
from shapes import SHAPES, build_model, card

from agentrl import heap
from agentrl.config import Config
from agentrl.engines.factory import make_engine
from agentrl.engines.pool import EnginePool
from agentrl.types import SamplingParams

WAYS = {"once": 1, "each": 0}
"""`engine.shared_prefill_tokens`."""


def config_for(arguments: argparse.Namespace, folder: Path, **engine: Any) -> Config:
    """An engine of one way."""
    longest = max(arguments.prompts) + 192
    settings = {"max_num_seqs": 256, "max_model_len": longest + 8, "transport": "gloo"}
    return server_config("sglang", arguments.shape, folder, engine=settings | engine)


def server_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Of the server, which both ways share."""
    if torch.cuda.is_available():
        chosen = {"extra": OPTIONS["sglang"], "api_server_count": arguments.api_servers}
    else:
        chosen = {"extra": {}}
    return chosen | {"python": arguments.python}


async def run_group(pool: EnginePool, name: str, prompt_tokens: int, members: int) -> list[int]:
    """All members of one group at once; sampled tokens, and prompt tokens that were computed."""
    generator = random.Random(name)
    prompt = [generator.randrange(VOCAB) for _ in range(prompt_tokens)]
    params = SamplingParams(generator.randint(64, 192), logprobs=False)
    calls = (
        pool.generate(prompt, params, rollout_id=f"{name}-{member}", group_id=name)
        for member in range(members)
    )
    answers = await asyncio.gather(*calls)
    computed = sum(prompt_tokens - answer.cached_tokens for answer in answers)
    return [sum(answer.num_sampled for answer in answers), computed]


async def run_round(
    pool: EnginePool, arguments: argparse.Namespace, name: str, prompt_tokens: int
) -> tuple[float, float]:
    """Sampled tokens per second, and how often a prompt was computed."""
    names: Iterator[str] = (f"{name}-{group}" for group in range(arguments.groups))
    found: list[list[int]] = []

    async def work() -> None:
        for group in names:
            found.append(await run_group(pool, group, prompt_tokens, arguments.members))

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(arguments.together)))
    seconds = time.perf_counter() - began
    sampled, computed = map(sum, zip(*found, strict=True))
    return sampled / seconds, computed / (arguments.groups * prompt_tokens)


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Every length of prompts, both ways in turn."""
    config = config_for(arguments, folder, **server_options(arguments), shared_prefill_tokens=1)
    if not torch.cuda.is_available():  # there the server starts with weights
        build_model(arguments.shape, device="cpu").save_pretrained(config.model.path)
    once = make_engine(config, run_dir=folder, model_folder=Path(config.model.path))
    assert isinstance(once, EnginePool)
    rates: dict[tuple[int, str], list[tuple[float, float]]] = {}
    async with AsyncExitStack() as stack:
        stack.push_async_callback(once.close)
        await once.start()
        print("the server has started", file=sys.stderr, flush=True)
        (engine,) = once.engines
        assert engine.server is not None
        same = config_for(
            arguments, folder, extra={}, urls=[engine.server.url], shared_prefill_tokens=0
        )
        each = make_engine(same, run_dir=folder, model_folder=Path(config.model.path))
        assert isinstance(each, EnginePool)
        stack.push_async_callback(each.close)
        await each.start()
        heap.freeze(once)  # as a learner does
        print("both have started", file=sys.stderr, flush=True)
        rounds = itertools.product(range(arguments.rounds + 1), arguments.prompts, WAYS)
        for turn, prompt_tokens, way in rounds:
            pool, name = {"once": once, "each": each}[way], f"{turn}-{prompt_tokens}-{way}"
            rate, computed = await run_round(pool, arguments, name, prompt_tokens)
            print(f"{name}: {rate:,.0f} tok/s, computed {computed:.2f} times", file=sys.stderr)
            if turn > 0:
                rates.setdefault((prompt_tokens, way), []).append((rate, computed))
    return {str(length): summary(rates, length) for length in arguments.prompts}


def summary(rates: dict[tuple[int, str], list[tuple[float, float]]], length: int) -> dict[str, Any]:
    """Of one length: medians over rounds, and of the rounds' ratios."""
    found: dict[str, Any] = {
        way: {
            "tokens_per_second": statistics.median(rate for rate, _ in rates[length, way]),
            "computed": statistics.median(computed for _, computed in rates[length, way]),
            "rounds": [rate for rate, _ in rates[length, way]],
        }
        for way in WAYS
    }
    pairs = zip(found["once"]["rounds"], found["each"]["rounds"], strict=True)
    return found | {"ratio": statistics.median(one / other for one, other in pairs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-1.5b")
    parser.add_argument("--prompts", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--groups", type=int, default=48, help="of a round")
    parser.add_argument("--together", type=int, default=16, help="groups at a time")
    parser.add_argument("--members", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--api-servers", type=int, default=4)
    parser.add_argument("--python", type=Path, help="Python of SGLang's environment")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = asyncio.run(measure(arguments, Path(name)))
    result = {**card(), **versions(arguments.python, ["sglang"]), "shape": arguments.shape}
    print(f"sglang {result.get('sglang', '(unknown)')}, {arguments.shape}, {result['card']}")
    print(
        f"{'prompt':>8}{'once, tok/s':>14}{'each, tok/s':>14}{'ratio':>8}{'computed by each':>18}"
    )
    for length, row in found.items():
        once, each = (row[way]["tokens_per_second"] for way in WAYS)
        computed = row["each"]["computed"]
        print(f"{length:>8}{once:>14,.0f}{each:>14,.0f}{row['ratio']:>8.2f}{computed:>18.2f}")
    if arguments.json:
        print(json.dumps({**result, "prompts": found}))


if __name__ == "__main__":
    main()
