"""Multi-turn rollouts through agentrl against the same episodes inside the engine's own process.

256 episodes of 4 turns (see `episodes.py`) run through scheduler, LLM, pool, engine and HTTP to a
server that agentrl starts, with and without log-probabilities; then the server ends and the same
episodes run in the engine's process with the same options. Every round has prompts of its own, so
that nothing is cached before it. Rates are sampled tokens per second, medians over rounds.

    python benchmarks/gpu/rollout.py --engine vllm [--shape qwen2.5-1.5b] [--python PYTHON]
        [--processes 1 4] [--api-servers 4] [--json]
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from episodes import Workload
from servers import server_config
from shapes import SHAPES, card

from agentrl.config import Config
from agentrl.engines.factory import make_engine
from agentrl.engines.pool import EnginePool
from agentrl.executors.attempts import Attempts
from agentrl.executors.build import local_attempts
from agentrl.executors.groups import GroupRequest
from agentrl.executors.scheduler import RolloutScheduler
from agentrl.executors.workers.attempts import ProcessAttempts
from agentrl.models.load import load_tokenizer
from agentrl.plugin import load_agent

AGENT = Path(__file__).with_name("talk.py")


@dataclass(frozen=True, slots=True)
class Round:
    """Sampled tokens per second of one round, and tokens that were and could have been cached."""

    rate: float
    cached: int
    possible: int


async def run_episodes(
    scheduler: RolloutScheduler, workload: Workload, seed: int, logprobs: bool
) -> Round:
    """Run all episodes."""
    # Every member is a request of its own, since it is told which feedback is its own.
    groups = [
        GroupRequest(
            f"{seed}-{group}-{member}",
            str(group),
            {
                "workload": asdict(workload),
                "group": group,
                "member": member,
                "seed": seed,
                "logprobs": logprobs,
            },
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
    cached, possible = (
        int(sum(trajectory.metrics[name] for trajectory in result.outcomes))
        for name in ("cached", "possible")
    )
    return Round(workload.tokens_sampled / seconds, cached, possible)


async def through_agentrl(
    config: Config, workload: Workload, folder: Path, rounds: int, processes: list[int]
) -> dict[int, Any]:
    """What `measure` gives, by `rollout.num_processes`, on one server."""
    pool = make_engine(config, run_dir=folder, model_folder=Path(config.model.path))
    assert isinstance(pool, EnginePool)
    try:
        await pool.start()
        found = {}
        for number in processes:
            rollout = config.rollout.model_copy(update={"num_processes": number})
            chosen = config.model_copy(update={"rollout": rollout})
            # No prompt comes up twice on the server.
            seeds = range(len(found) * (rounds + 1), (len(found) + 1) * (rounds + 1))
            found[number] = await measure(chosen, pool, workload, seeds)
    finally:
        await pool.close()
    return found


async def measure(config: Config, pool: EnginePool, workload: Workload, seeds: range) -> Any:
    """Rates by round with and without log-probabilities, and the share of cache hits; the first
    round does not count."""
    attempts: Attempts
    if config.rollout.num_processes > 1:
        attempts = ProcessAttempts(config, pool, ())
    else:
        executor = load_agent(config.agent).make_executor(config.rollout, config.data)
        attempts = local_attempts(config, executor, pool, load_tokenizer(config.model), ())
    scheduler = RolloutScheduler(attempts, config.rollout)
    rates: dict[str, list[float]] = {"without": [], "with": []}
    done: list[Round] = []
    try:
        await attempts.start()
        for seed in seeds:
            for name, logprobs in (("without", False), ("with", True)):
                done.append(await run_episodes(scheduler, workload, 2 * seed + logprobs, logprobs))
                print(
                    f"{config.rollout.num_processes} processes, {name} log-probabilities: "
                    f"{done[-1].rate:,.0f} tok/s",
                    file=sys.stderr,
                    flush=True,
                )
                if seed > seeds[0]:
                    rates[name].append(done[-1].rate)
    finally:
        await attempts.close()
    hits = sum(each.cached for each in done) / sum(each.possible for each in done)
    return {"tokens_per_second": rates, "cache_hit_of_possible": hits}


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
    parser.add_argument(
        "--processes", type=int, nargs="+", default=[1, 4], help="values of rollout.num_processes"
    )
    parser.add_argument(
        "--api-servers", type=int, default=1, help="engine.api_server_count of the server"
    )
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    workload = Workload(**json.loads(arguments.workload))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        engine: dict[str, Any] = {
            "python": arguments.python,
            "max_num_seqs": workload.episodes,
            "max_model_len": workload.max_model_len,
            "api_server_count": arguments.api_servers,
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
        ).model_copy(update={"agent": AGENT})
        found = asyncio.run(
            through_agentrl(config, workload, folder, arguments.rounds, arguments.processes)
        )
        bare = in_process(config, workload, folder, arguments.rounds)
    result = {
        **card(),
        "engine": arguments.engine,
        "shape": arguments.shape,
        "api_servers": arguments.api_servers,
        "processes": {},
    }
    print(
        f"{arguments.engine}, {arguments.shape}, {arguments.api_servers} API servers, "
        f"{result['card']}"
    )
    print(
        f"{'processes':>10}{'log-probabilities':>20}{'agentrl tok/s':>16}{'in process':>14}"
        f"{'ratio':>8}{'hits':>8}"
    )
    for number, ours in found.items():
        row = result["processes"][number] = {"cache_hit_of_possible": ours["cache_hit_of_possible"]}
        for name in ("without", "with"):
            mine, limit = (
                statistics.median(side["tokens_per_second"][name]) for side in (ours, bare)
            )
            row[name] = {
                "tokens_per_second": mine,
                "in_process_tokens_per_second": limit,
                "ratio": mine / limit,
                "rounds": ours["tokens_per_second"][name],
                "in_process_rounds": bare["tokens_per_second"][name],
            }
            print(
                f"{number:>10}{name:>20}{mine:>16,.0f}{limit:>14,.0f}{mine / limit:>8.2f}"
                f"{row['cache_hit_of_possible']:>8.3f}"
            )
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
