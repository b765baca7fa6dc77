"""Multi-turn rollouts through agentrl against the same episodes inside the engine's own process.

256 episodes of 4 turns (see `episodes.py`) run through scheduler, LLM, pool, engine and HTTP to a
server that agentrl starts, with and without log-probabilities; then the server ends and the same
episodes run in the engine's process with the same options. Every round has prompts of its own, so
that nothing is cached before it. Rates are sampled tokens per second, medians over rounds.

    python benchmarks/gpu/rollout.py --engine vllm [--shape qwen2.5-1.5b] [--python PYTHON] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from episodes import Workload
from servers import server_config
from shapes import SHAPES, card

from agentrl.chat import ChatFormat
from agentrl.config import Config
from agentrl.engines.base import Engine
from agentrl.engines.factory import make_engine
from agentrl.executors.base import AgentExecutor
from agentrl.executors.groups import GroupRequest
from agentrl.executors.llm import LLM
from agentrl.executors.scheduler import RolloutScheduler
from agentrl.models.load import load_tokenizer
from agentrl.types import Example, SamplingParams, StopReason, Trajectory


class Talk(AgentExecutor):
    """One episode of the workload, on tokens."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.cached = self.possible = 0

    async def execute(self, example: Example, llm: LLM) -> Trajectory:
        """Sample the turns; count what the prefix cache gave and could have given."""
        context = self.workload.prompt_ids(example["group"], example["seed"])
        computed = 0
        for feedback in self.workload.feedback_ids(example["group"], example["member"]):
            result = await llm.generate(context)
            self.cached += result.cached_tokens if computed else 0
            self.possible += computed
            context = context + result.token_ids.tolist()
            computed = len(context) - 1  # the last sampled token was never an input
            context = context + feedback
        return Trajectory((), 1.0, StopReason.DONE)


async def run_episodes(
    engine: Engine, chat: ChatFormat, config: Config, talk: Talk, seed: int, logprobs: bool
) -> float:
    """Run all episodes; sampled tokens per second."""
    workload = talk.workload
    params = SamplingParams(workload.sampled, min_new_tokens=workload.sampled, logprobs=logprobs)
    scheduler = RolloutScheduler.local(
        talk, engine, chat, params, config.rollout, logprobs_share=float(logprobs)
    )
    # Every member is a request of its own, since it is told which feedback is its own.
    groups = [
        GroupRequest(
            f"{seed}-{group}-{member}",
            str(group),
            {"group": group, "member": member, "seed": seed},
            1,
        )
        for group in range(workload.groups)
        for member in range(workload.members)
    ]
    began = time.perf_counter()
    result = await scheduler.run(groups)
    seconds = time.perf_counter() - began
    if len(result.groups) != workload.episodes:
        raise RuntimeError(f"only {len(result.groups)} episodes ended well")
    return workload.tokens_sampled / seconds


async def through_agentrl(config: Config, workload: Workload, folder: Path, rounds: int) -> Any:
    """Rates by round with and without log-probabilities, and the share of cache hits."""
    tokenizer = load_tokenizer(config.model)
    engine = make_engine(config, run_dir=folder, model_folder=Path(config.model.path))
    chat, talk = ChatFormat(tokenizer), Talk(workload)
    rates: dict[str, list[float]] = {"without": [], "with": []}
    try:
        await engine.start()
        for seed in range(rounds + 1):
            for name, logprobs in (("without", False), ("with", True)):
                found = await run_episodes(
                    engine, chat, config, talk, 2 * seed + logprobs, logprobs
                )
                if seed > 0:
                    rates[name].append(found)
    finally:
        await engine.close()
    return {"tokens_per_second": rates, "cache_hit_of_possible": talk.cached / talk.possible}


def in_process(config: Config, workload: Workload, folder: Path, rounds: int) -> Any:
    """The same inside the engine."""
    options = config.engine.extra | {"dtype": config.model.dtype}
    if config.engine.kind == "vllm":
        options |= {
            "max_model_len": workload.max_model_len,
            "max_num_seqs": config.engine.max_num_seqs,
            "logprobs_mode": "processed_logprobs",
        }
    else:
        options |= {
            "context_length": workload.max_model_len + 8,
            "max_running_requests": config.engine.max_num_seqs,
        }
    call = {
        "kind": config.engine.kind,
        "model": config.model.path,
        "rounds": rounds,
        "options": options,
        "logprobs": [False, True],
        "workload": asdict(workload),
    }
    script, answer = Path(__file__).with_name("in_process.py"), folder / "in_process.json"
    python = config.engine.python or sys.executable
    subprocess.run([python, script, json.dumps(call), answer], check=True)
    return json.loads(answer.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("vllm", "sglang"), required=True)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-1.5b")
    parser.add_argument("--python", type=Path, help="Python of the engine's environment")
    parser.add_argument("--options", type=Path, help="TOML with options of the server")
    parser.add_argument("--workload", default="{}", help="JSON with fields of episodes.Workload")
    parser.add_argument("--rounds", type=int, default=5, help="the median counts")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    workload = Workload(**json.loads(arguments.workload))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine: dict[str, Any] = {
            "python": arguments.python,
            "max_num_seqs": workload.episodes,
            "max_model_len": workload.max_model_len,
        }
        if arguments.options:
            engine["extra"] = tomllib.loads(arguments.options.read_text())
        rollout = {
            "max_tokens": workload.max_model_len,
            "max_new_tokens": workload.sampled,
            "max_concurrency": workload.episodes,
        }
        config = server_config(
            arguments.engine, arguments.shape, folder, engine=engine, rollout=rollout
        )
        ours = asyncio.run(through_agentrl(config, workload, folder, arguments.rounds))
        bare = in_process(config, workload, folder, arguments.rounds)
    result = {**card(), "engine": arguments.engine, "shape": arguments.shape}
    print(f"{arguments.engine}, {arguments.shape}, {result['card']}")
    print(f"{'log-probabilities':20}{'agentrl tok/s':>16}{'in process':>14}{'ratio':>8}")
    for name in ("without", "with"):
        mine, limit = (statistics.median(side["tokens_per_second"][name]) for side in (ours, bare))
        result[name] = {
            "tokens_per_second": mine,
            "in_process_tokens_per_second": limit,
            "ratio": mine / limit,
            "rounds": ours["tokens_per_second"][name],
            "in_process_rounds": bare["tokens_per_second"][name],
        }
        print(f"{name:20}{mine:>16,.0f}{limit:>14,.0f}{mine / limit:>8.2f}")
    result["cache_hit_of_possible"] = ours["cache_hit_of_possible"]
    print(f"prefix-cache hits of possible: {result['cache_hit_of_possible']:.3f}")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
