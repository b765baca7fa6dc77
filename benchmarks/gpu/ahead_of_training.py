"""Synchronous training and rollouts ahead of it, on the same two GPUs and the same server.

`two_gpus.py` starts it. One server on GPU 1, started once, serves two runs of `learning.py`
(`--url`) whose learner is on GPU 0: with `--max-staleness` 0 and 1. Weights travel by NCCL. GPU 0
is left alone until the server has started and standard input has ended.
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

from servers import OPTIONS

from agentrl.config import Config
from agentrl.engines.factory import make_engine
from agentrl.engines.pool import EnginePool
from agentrl.models.load import load_policy, load_tokenizer

HERE = Path(__file__).parent
MAX_TOKENS = 832
"""Of an episode: the default of `learning.py`."""
SHARE: dict[str, dict[str, Any]] = {
    # Measured, memory that other servers take while this one starts would be taken for its own.
    "vllm": {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 8 << 30},
    "sglang": {"mem_fraction_static": 0.2},
}


def server_config(arguments: argparse.Namespace) -> Config:
    """The server."""
    options = {k: v for k, v in OPTIONS[arguments.engine].items() if k != "load_format"}
    return Config.model_validate(
        {
            "agent": "benchmark",
            "model": {"path": str(arguments.model), "dtype": "bfloat16"},
            "engine": {
                "kind": arguments.engine,
                "python": arguments.python,
                "gpus": [1],
                "transport": "nccl",
                "max_num_seqs": 256,
                "max_model_len": MAX_TOKENS,
                "extra": options | SHARE[arguments.engine],
            },
            "rollout": {"max_tokens": MAX_TOKENS},
        }
    )


def learn(arguments: argparse.Namespace, url: str, staleness: int, folder: Path) -> dict[str, Any]:
    """One run, in a process of its own."""
    script = [sys.executable, HERE / "learning.py", "--engine", arguments.engine, "--url", url]
    settings = {
        "model": arguments.model,
        "steps": arguments.steps,
        "groups": 32,
        "lr": 2e-5,
        "max-tokens": MAX_TOKENS,
        "max-staleness": staleness,
        "evaluations": 1,
        "compared": 0,
        "out": folder,
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
    subprocess.run([*map(str, script), *map(str, flags)], check=True, stdout=sys.stderr)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Serve both runs."""
    config = server_config(arguments)
    model = folder / "model"
    load_policy(config.model, seed=0).save_pretrained(model)
    load_tokenizer(config.model).save_pretrained(model)
    pool = make_engine(config, run_dir=folder, model_folder=model)
    assert isinstance(pool, EnginePool), "servers come as a pool"
    names = ("held_out", "curve", "seconds_a_step", "staleness_mean", "step_seconds")
    found = {}
    try:
        await pool.start()
        await asyncio.to_thread(sys.stdin.read)
        (server,) = (engine.server for engine in pool.engines)
        for staleness in (0, 1):
            result = await asyncio.to_thread(
                learn, arguments, server.url, staleness, folder / f"run-{staleness}"
            )
            found[f"max_staleness {staleness}"] = {name: result[name] for name in names}
    finally:
        await pool.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("vllm", "sglang"), required=True)
    parser.add_argument("--python", type=Path)
    parser.add_argument("--model", type=Path, required=True, help="SmolLM2, as for learning.py")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found = asyncio.run(measure(arguments, Path(name)))
    arguments.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
