"""Synchronous training and rollouts ahead of it, on the same two GPUs and the same server.

`two_gpus.py` starts it. One server on GPU 1, started once, serves two runs of `learning.py`
(`--url`) whose learner is on GPU 0: with `--max-staleness` 0 and 1. Weights travel by NCCL. GPU 0
is left alone until the server has started and it is this script's turn (`wait_for_turn`); both
learners' processes have begun by then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from servers import OPTIONS
from split_placement import START_TIMEOUT, wait_for_turn

from agentrl.config import Config
from agentrl.engines.factory import make_engine
from agentrl.engines.pool import EnginePool
from agentrl.models.load import load_policy, load_tokenizer

HERE = Path(__file__).parent
MAX_TOKENS = 832
"""Of an episode: the default of `learning.py`."""
SHARE: dict[str, dict[str, Any]] = {
    # Measured, memory that other servers take while this one starts would be taken for its own.
    # What SGLang's share leaves of the memory that was free at its start must stay free.
    "vllm": {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 8 << 30},
    "sglang": {"mem_fraction_static": 0.9, "max_total_tokens": 256 << 10},
}
KEPT = (
    *("held_out", "rise_in_stderr", "curve"),
    *("seconds_a_step", "staleness_mean", "step_seconds"),
)
"""Of what a run found."""
LEARNER = """
import json, sys
import deepspeed, learning  # which takes long
sys.argv[1:] = json.load(sys.stdin)
learning.main()
"""
"""`learning.py` in a process that begins before its flags are known."""


def server_config(arguments: argparse.Namespace) -> Config:
    """The server."""
    engine: dict[str, Any] = {
        "kind": arguments.engine,
        "python": arguments.python,
        "transport": "gloo",
        "max_num_seqs": 256,
        "max_model_len": arguments.max_tokens,
    }
    if torch.cuda.is_available():
        options = {k: v for k, v in OPTIONS[arguments.engine].items() if k != "load_format"}
        engine |= {"gpus": [1], "transport": "nccl", "start_timeout": START_TIMEOUT}
        engine["extra"] = options | SHARE[arguments.engine]
    return Config.model_validate(
        {
            "agent": "benchmark",
            "model": {"path": str(arguments.model), "dtype": "bfloat16"},
            "engine": engine,
            "rollout": {"max_tokens": arguments.max_tokens},
        }
    )


def begin_learner() -> subprocess.Popen[str]:
    """The process of one run, which waits for its flags."""
    return subprocess.Popen(
        [sys.executable, "-c", LEARNER],
        cwd=HERE,
        stdin=subprocess.PIPE,
        stdout=sys.stderr,
        text=True,
    )


def flags_of(arguments: argparse.Namespace) -> dict[str, object]:
    """What both runs are told."""
    return {
        "engine": arguments.engine,
        "steps": arguments.steps,
        "groups": arguments.groups,
        "examples": arguments.examples,
        "lr": 2e-5,
        "max-tokens": arguments.max_tokens,
        "evaluations": 1,
        "compared": 0,
    }


def learn(process: subprocess.Popen[str], flags: dict[str, object]) -> dict[str, Any]:
    """One run.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    process.communicate(json.dumps([part for k, v in flags.items() for part in (f"--{k}", str(v))]))
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, "learning.py")
    found: dict[str, Any] = json.loads((Path(str(flags["out"])) / "result.json").read_text())
    return found


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Serve both runs."""
    config = server_config(arguments)
    model = folder / "model"
    load_policy(config.model, seed=0).save_pretrained(model)
    load_tokenizer(config.model).save_pretrained(model)
    pool = make_engine(config, run_dir=folder, model_folder=model)
    assert isinstance(pool, EnginePool), "servers come as a pool"
    found = {}
    learners = {staleness: begin_learner() for staleness in (0, 1)}
    try:
        await pool.start()
        await asyncio.to_thread(wait_for_turn, arguments.out)
        (server,) = (engine.server for engine in pool.engines)
        assert server is not None, "it was started here"
        for staleness, process in learners.items():
            flags = flags_of(arguments) | {
                "model": model,
                "url": server.url,
                "max-staleness": staleness,
                "out": folder / f"run-{staleness}",
            }
            result = await asyncio.to_thread(learn, process, flags)
            found[f"max_staleness {staleness}"] = {name: result[name] for name in KEPT}
    finally:
        for process in learners.values():
            process.kill()
        await pool.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("vllm", "sglang"), required=True)
    parser.add_argument("--python", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="SmolLM2, as for learning.py")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--groups", type=int, default=16, help="questions of a step")
    parser.add_argument("--examples", type=int, default=256, help="questions there are")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="of an episode")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = asyncio.run(measure(arguments, Path(name)))
    arguments.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
