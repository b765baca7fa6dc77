"""What the whole rollout stack costs on a real server, against a bare replay of its requests.

64 episodes of 5 turns run through scheduler, LLM, pool and engine. Every request is recorded and
then replayed by a plain httpx client that knows the answers' lengths but nothing else: the turns of
an episode one after the other, the episodes at once. Both start with an empty prefix cache, take
turns, and ask for the same number of tokens, so that `ratio` compares tokens per second.

    python benchmarks/rollout_vs_raw.py --engine vllm --python PYTHON_OF_THE_ENGINE [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from agentrl.chat import ChatFormat
from agentrl.config import Config
from agentrl.engines.base import Engine, WeightSource
from agentrl.engines.factory import make_engine
from agentrl.engines.pool import EnginePool
from agentrl.executors.base import AgentExecutor
from agentrl.executors.groups import GroupRequest
from agentrl.executors.llm import LLM
from agentrl.executors.scheduler import RolloutScheduler
from agentrl.models.load import load_policy, load_tokenizer
from agentrl.types import Example, Generation, SamplingParams, StopReason, Trajectory

EXAMPLES = Path(__file__).parents[1] / "examples" / "engines"
GROUPS, MEMBERS, TURNS = 8, 8, 5
PROMPT_TOKENS, RESPONSE_TOKENS, FEEDBACK_TOKENS = 64, 32, 32
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Result:
    """The figures that are printed. Tokens are sampled ones; rates are medians over rounds."""

    engine: str
    episodes: int
    requests: int
    rollout_tokens_per_second: float
    raw_tokens_per_second: float
    ratio: float
    cached_tokens: int
    cacheable_tokens: int
    cache_hit_of_possible: float


class Recorder(Engine):
    """The engine as it is, and what it was asked and answered, by episode."""

    def __init__(self, pool: EnginePool) -> None:
        self.pool = pool
        self.records: dict[str, list[tuple[list[int], Generation]]] = defaultdict(list)

    @property
    def weight_version(self) -> int:
        """That of the pool."""
        return self.pool.weight_version

    @property
    def max_model_len(self) -> int:
        """That of the pool."""
        return self.pool.max_model_len

    async def generate(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        rollout_id: str = "",
        group_id: str = "",
    ) -> Generation:
        """Sample, and keep both sides."""
        result = await self.pool.generate(
            token_ids, params, rollout_id=rollout_id, group_id=group_id
        )
        self.records[rollout_id].append((list(token_ids), result))
        return result

    async def update_weights(self, source: WeightSource) -> None:
        """Hand on."""
        await self.pool.update_weights(source)


class Talk(AgentExecutor):
    """A prompt shared by its group, then turns of sampled tokens and feedback."""

    async def execute(self, example: Example, llm: LLM) -> Trajectory:
        """Run one episode on tokens."""
        prompt = random.Random(example["group"])
        context = [prompt.randrange(5, 60) for _ in range(PROMPT_TOKENS)]
        feedback = random.Random(llm.rollout_id)
        for _ in range(TURNS):
            result = await llm.generate(context)
            context += result.token_ids.tolist()
            context += [feedback.randrange(5, 60) for _ in range(FEEDBACK_TOKENS)]
        return Trajectory((), 1.0, StopReason.DONE)


async def rollout(recorder: Recorder, chat: ChatFormat, config: Config) -> float:
    """Run all episodes; tokens per second."""
    recorder.records.clear()
    await recorder.pool.flush_cache()
    params = SamplingParams(RESPONSE_TOKENS, min_new_tokens=RESPONSE_TOKENS)
    scheduler = RolloutScheduler(Talk(), recorder, chat, params, config.rollout)
    groups = [GroupRequest(f"{g:04d}", str(g), {"group": g}, MEMBERS) for g in range(GROUPS)]
    started = time.perf_counter()
    await scheduler.run(groups)
    seconds = time.perf_counter() - started
    turns = [turn for episode in recorder.records.values() for turn in episode]
    if len(turns) != GROUPS * MEMBERS * TURNS:
        raise RuntimeError(f"{len(turns)} turns were sampled: an episode broke")
    return sum(len(result.token_ids) for _, result in turns) / seconds


async def replay(recorder: Recorder, kind: str, round_number: int) -> float:
    """Send the recorded requests bare; tokens per second."""
    await recorder.pool.flush_cache()
    (engine,) = recorder.pool.engines
    assert engine.server is not None
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=engine.server.url, timeout=600, limits=limits) as client:

        async def episode(name: str, turns: list[tuple[list[int], Generation]]) -> int:
            sampled = 0
            for turn, (prompt, _) in enumerate(turns):
                path, body = bare_request(kind, prompt, f"raw-{round_number}-{name}-{turn}")
                answer = (await client.post(path, json=body)).raise_for_status().json()
                ids = answer["output_ids"] if kind == "sglang" else None
                sampled += len(ids if ids is not None else answer["choices"][0]["token_ids"])
            return sampled

        started = time.perf_counter()
        counts = await asyncio.gather(*(episode(*item) for item in recorder.records.items()))
        return sum(counts) / (time.perf_counter() - started)


def bare_request(kind: str, prompt: list[int], name: str) -> tuple[str, dict[str, Any]]:
    """Path and body of a request for the same number of tokens."""
    if kind == "vllm":
        params = {"max_tokens": RESPONSE_TOKENS, "ignore_eos": True, "logprobs": 0}
        body: dict[str, Any] = {"token_ids": prompt, "request_id": name, "sampling_params": params}
        return "/inference/v1/generate", body
    params = {"max_new_tokens": RESPONSE_TOKENS, "ignore_eos": True}
    body = {"input_ids": prompt, "rid": name, "sampling_params": params}
    return "/generate", body | {"return_logprob": True, "logprob_start_len": -1}


def cacheable(records: dict[str, list[tuple[list[int], Generation]]], block: int) -> int:
    """Prompt tokens of later turns that the turn before has left behind, in whole blocks.

    The last sampled token of a turn is never computed, so it cannot be cached.
    """
    total = 0
    for turns in records.values():
        for prompt, result in turns[:-1]:
            total += (len(prompt) + len(result.token_ids) - 1) // block * block
    return total


async def measure(config: Config, folder: Path) -> Result:
    """Start the server, take turns, compare."""
    tokenizer = load_tokenizer(config.model)
    model = folder / "model"
    load_policy(config.model, 0).save_pretrained(model)
    tokenizer.save_pretrained(model)
    pool = make_engine(config, run_dir=folder, model_folder=model)
    assert isinstance(pool, EnginePool)
    recorder = Recorder(pool)
    kind = config.engine.kind
    try:
        await pool.start()
        chat = ChatFormat(tokenizer)
        await rollout(recorder, chat, config)  # the first requests of a server are slow
        await replay(recorder, kind, 0)
        rates = []
        for i in range(1, ROUNDS + 1):
            rates.append((await rollout(recorder, chat, config), await replay(recorder, kind, i)))
        later = [turn for turns in recorder.records.values() for turn in turns[1:]]
        cached = sum(result.cached_tokens for _, result in later)
        possible = cacheable(recorder.records, int(config.engine.extra.get("block_size", 1)))
    finally:
        await pool.close()
    ours, raw = (statistics.median(column) for column in zip(*rates, strict=True))
    return Result(
        engine=kind,
        episodes=GROUPS * MEMBERS,
        requests=GROUPS * MEMBERS * TURNS,
        rollout_tokens_per_second=ours,
        raw_tokens_per_second=raw,
        ratio=statistics.median(a / b for a, b in rates),
        cached_tokens=cached,
        cacheable_tokens=possible,
        cache_hit_of_possible=cached / possible,
    )


def main() -> None:
    """Measure and print a table; with --json one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("vllm", "sglang"), required=True)
    parser.add_argument("--python", type=Path, help="Python of the engine's environment")
    parser.add_argument("--config", type=Path, help="TOML; without it, the engine's CPU example")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    arguments = parser.parse_args()
    path = arguments.config or EXAMPLES / f"{arguments.engine}-cpu.toml"
    sections = {"rollout": {"max_tokens": 512, "max_new_tokens": RESPONSE_TOKENS}}
    sections |= tomllib.loads(path.read_text())
    sections["engine"] |= {"max_model_len": 512}
    if arguments.python is not None:
        sections["engine"]["python"] = arguments.python
    config = Config.model_validate({"agent": "benchmark", **sections})
    with tempfile.TemporaryDirectory() as folder:
        result = asdict(asyncio.run(measure(config, Path(folder))))
    for name, value in result.items():
        print(
            f"{name:28}{value:>14,.3f}" if isinstance(value, float) else f"{name:28}{value!s:>14}"
        )
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
