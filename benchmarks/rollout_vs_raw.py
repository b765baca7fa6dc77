"""What the whole rollout stack costs on a real server, against a bare replay of its requests.

64 episodes of 5 turns run through scheduler, LLM, pool and engine. The body of every HTTP request
is recorded and then sent again by a plain httpx client: the turns of an episode one after the
other, the episodes at once. Both start with an empty prefix cache and take turns, so that `ratio`
compares tokens per second of the same work.

    python benchmarks/rollout_vs_raw.py --engine vllm [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from agentrl.chat import ChatFormat
from agentrl.config import Config, EngineConfig
from agentrl.engines import on_cpu, remote
from agentrl.engines.base import Engine, WeightSource
from agentrl.engines.factory import make_engine
from agentrl.engines.http import EngineClient
from agentrl.engines.pool import EnginePool
from agentrl.executors.base import AgentExecutor
from agentrl.executors.groups import GroupRequest
from agentrl.executors.llm import LLM
from agentrl.executors.scheduler import RolloutScheduler
from agentrl.models.load import load_policy, load_tokenizer
from agentrl.types import Example, Generation, SamplingParams, StopReason, Trajectory

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "engines"
ENGINE_ENV = ROOT / "scripts" / "engine_env.py"
GROUPS, MEMBERS, TURNS = 8, 8, 5
PROMPT_TOKENS, RESPONSE_TOKENS, FEEDBACK_TOKENS = 64, 32, 32
ROUNDS = 5
ID_FIELDS = {"/inference/v1/generate": "request_id", "/generate": "rid"}
"""The routes for tokens, and the field of the body that must differ between requests."""

Request = tuple[str, dict[str, Any]]
_requests: ContextVar[list[Request]] = ContextVar("requests")


@dataclass(frozen=True, slots=True)
class Turn:
    """A request as it was sent, the tokens of its prompt, and its answer."""

    request: Request
    prompt_tokens: int
    result: Generation


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
        self.records: dict[str, list[Turn]] = defaultdict(list)

    @property
    def weight_version(self) -> int:
        """That of the pool."""
        return self.pool.weight_version

    @property
    def max_model_len(self) -> int:
        """That of the pool."""
        return self.pool.max_model_len

    @property
    def repeats(self) -> bool:
        """As the pool does."""
        return self.pool.repeats

    async def generate(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        rollout_id: str = "",
        group_id: str = "",
    ) -> Generation:
        """Sample, and keep both sides."""
        sent: list[Request] = []
        _requests.set(sent)
        result = await self.pool.generate(
            token_ids, params, rollout_id=rollout_id, group_id=group_id
        )
        (request,) = sent
        self.records[rollout_id].append(Turn(request, len(token_ids), result))
        return result

    async def update_weights(self, source: WeightSource) -> None:
        """Hand on."""
        await self.pool.update_weights(source)


class RecordingClient(EngineClient):
    """Notes the requests for tokens in the list that the context holds."""

    async def post(self, path: str, body: Any = None, **options: Any) -> Any:
        """Send as ever."""
        sent = _requests.get(None)
        if sent is not None and path in ID_FIELDS:
            sent.append((path, body))
        return await super().post(path, body, **options)


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
    scheduler = RolloutScheduler.local(Talk(), recorder, chat, params, config.rollout)
    groups = [GroupRequest(f"{g:04d}", str(g), {"group": g}, MEMBERS) for g in range(GROUPS)]
    started = time.perf_counter()
    await scheduler.run(groups)
    seconds = time.perf_counter() - started
    turns = [turn for episode in recorder.records.values() for turn in episode]
    if len(turns) != GROUPS * MEMBERS * TURNS:
        raise RuntimeError(f"{len(turns)} turns were sampled: an episode broke")
    return sum(len(turn.result.token_ids) for turn in turns) / seconds


async def replay(recorder: Recorder, round_number: int) -> float:
    """Send the recorded requests bare; tokens per second."""
    await recorder.pool.flush_cache()
    (engine,) = recorder.pool.engines
    assert engine.server is not None
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=engine.server.url, timeout=600, limits=limits) as client:

        async def episode(name: str, turns: list[Turn]) -> int:
            sampled = 0
            for index, turn in enumerate(turns):
                path, body = turn.request
                body = body | {ID_FIELDS[path]: f"raw-{round_number}-{name}-{index}"}
                answer = (await client.post(path, json=body)).raise_for_status().json()
                ids = answer["output_ids"] if path == "/generate" else None
                sampled += len(ids if ids is not None else answer["choices"][0]["token_ids"])
            return sampled

        started = time.perf_counter()
        counts = await asyncio.gather(*(episode(*item) for item in recorder.records.items()))
        return sum(counts) / (time.perf_counter() - started)


def cacheable(records: dict[str, list[Turn]], block: int) -> int:
    """Prompt tokens of later turns that the turn before has left behind, in whole blocks.

    The last sampled token of a turn is never computed, so it cannot be cached.
    """
    total = 0
    for turns in records.values():
        for turn in turns[:-1]:
            total += (turn.prompt_tokens + len(turn.result.token_ids) - 1) // block * block
    return total


def block_size(config: EngineConfig) -> int:
    """Tokens that the engine caches as one."""
    if config.kind == "sglang":
        return int(config.extra.get("page_size", 1))
    usual = 16 if on_cpu.has_gpu() else on_cpu.VLLM_OPTIONS["block_size"]
    return int(config.extra.get("block_size", usual))


async def measure(config: Config, folder: Path) -> Result:
    """Start the server, take turns, compare."""
    tokenizer = load_tokenizer(config.model)
    model = folder / "model"
    load_policy(config.model, 0).save_pretrained(model)
    tokenizer.save_pretrained(model)
    remote.EngineClient = RecordingClient  # type: ignore[misc]
    pool = make_engine(config, run_dir=folder, model_folder=model)
    assert isinstance(pool, EnginePool)
    recorder = Recorder(pool)
    try:
        await pool.start()
        chat = ChatFormat(tokenizer)
        await rollout(recorder, chat, config)  # the first requests of a server are slow
        await replay(recorder, 0)
        rates = []
        for i in range(1, ROUNDS + 1):
            rates.append((await rollout(recorder, chat, config), await replay(recorder, i)))
        later = [turn for turns in recorder.records.values() for turn in turns[1:]]
        cached = sum(turn.result.cached_tokens for turn in later)
        possible = cacheable(recorder.records, block_size(config.engine))
    finally:
        await pool.close()
    ours, raw = (statistics.median(column) for column in zip(*rates, strict=True))
    return Result(
        engine=config.engine.kind,
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
    parser.add_argument(
        "--python", type=Path, help="of the engine; else that of scripts/engine_env.py"
    )
    parser.add_argument("--config", type=Path, help="TOML; without it, the engine's CPU example")
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    arguments = parser.parse_args()
    if arguments.python is None:
        command = [sys.executable, str(ENGINE_ENV), arguments.engine]
        arguments.python = subprocess.check_output(command, text=True).strip()
    path = arguments.config or EXAMPLES / f"{arguments.engine}-cpu.toml"
    sections: dict[str, Any] = {"rollout": {"max_tokens": 512, "max_new_tokens": RESPONSE_TOKENS}}
    sections |= tomllib.loads(path.read_text())
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
