"""Learner and engines on two GPUs of one host, in every arrangement; prints a table and JSON.

| part | arrangement | what is measured |
| --- | --- | --- |
| split | learner on GPU 0, server on GPU 1, transport nccl | seconds of an update and GB/s beside a bare broadcast of as many bytes; what requests in flight wait for; greedy output against the model |
| sharded | ZeRO-3 over both GPUs, no server | losses and weights against one GPU's; tokens per second and memory |
| colocated | both, an engine on each rank's GPU, ipc, sleep | seconds and memory by phase; log-probabilities of each engine against the learner |
| asynchronous | learner on GPU 0, server on GPU 1 | `learning.py` with `--max-staleness` 1 and 0: seconds a step, reward |
| tensor_parallel | as colocated, with one engine on both GPUs | the same |

    python benchmarks/gpu/two_gpus.py --engine vllm --python PYTHON --model SMOLLM2.gguf \\
        [--parts split sharded ...] [--json]

Each part runs in processes of its own, one after another. What a part printed goes to stderr; one
that fails is said so, and the others run.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from shapes import card

HERE = Path(__file__).parent
SHARDED: Sequence[Mapping[str, Any]] = (
    {
        "name": "1.5b, 4 layers, float32",
        "shape": "qwen2.5-1.5b",
        "layers": 4,
        "dtype": "float32",
        "length": 1024,
    },
    {"name": "1.5b", "shape": "qwen2.5-1.5b"},
    {"name": "7b", "shape": "qwen2.5-7b", "gradient_checkpointing": True},
)
"""The cases of `sharded_learner.py`; the last may not fit one GPU."""


class Runner:
    """Runs the scripts beside this one and reads what they found."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self._folder, self._count = arguments, folder, 0

    def run(self, script: str, *options: object, ranks: int = 0) -> Any:
        """The JSON that a script left: alone, or under torchrun on so many ranks.

        Raises:
            subprocess.CalledProcessError: it failed.
        """
        self._count += 1
        out = self._folder / f"{self._count}.json"
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        command = [sys.executable, *(torchrun if ranks else []), HERE / script, *options]
        subprocess.run([*map(str, command), "--out", str(out)], check=True, stdout=sys.stderr)
        return json.loads((out / "result.json" if out.is_dir() else out).read_text())

    def engine(self) -> list[object]:
        """The options that say which engine."""
        python = self.arguments.python
        return ["--engine", self.arguments.engine, *(["--python", python] if python else [])]


def split(runner: Runner) -> dict[str, Any]:
    """Part 1."""
    arguments = runner.arguments
    found: dict[str, Any] = runner.run(
        "split_placement.py",
        *runner.engine(),
        *("--bucket-mb", arguments.bucket_mb, "--shapes", *arguments.shapes),
    )
    sizes = sorted({row["bytes"] for row in found.values()})
    bare = runner.run("bare_broadcast.py", *sizes, ranks=2)
    for row in found.values():
        row["bare_seconds"] = bare[str(row["bytes"])]
        row["gigabytes_per_second"] = row["bytes"] / row["update"] / 1e9
        row["bare_gigabytes_per_second"] = row["bytes"] / row["bare_seconds"] / 1e9
        row["share_of_bare"] = row["bare_seconds"] / row["update"]
    return found


def sharded(runner: Runner) -> dict[str, Any]:
    """Part 2."""
    cases = [json.dumps(case) for case in runner.arguments.cases]
    one = runner.run("sharded_learner.py", *cases)
    two = runner.run("sharded_learner.py", *cases, ranks=2)
    return {name: compare(one[name], two[name]) for name in two}


def compare(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    """Two runs of one case: rates of both, and how far their results are apart.

    `weight_difference` and `weight_movement` are the largest absolute values over the elements that
    were kept: between the two runs after the last update, and of what the updates did.
    """
    rates = ("seconds", "tokens_per_second", "tflops", "peak_gib", "out_of_memory")
    found: dict[str, Any] = {
        "one": {name: one[name] for name in rates if name in one},
        "two": {name: two[name] for name in rates if name in two},
    }
    if "out_of_memory" in one:
        return found
    pairs = [(np.array(one["after"][k]), np.array(two["after"][k])) for k in one["after"]]
    moved = [np.array(one["after"][k]) - np.array(one["before"][k]) for k in one["after"]]
    losses, norms = (
        np.abs(np.array(one[k]) / np.array(two[k]) - 1).max() for k in ("losses", "grad_norms")
    )
    return {
        **found,
        "loss_relative_difference": float(losses),
        "grad_norm_relative_difference": float(norms),
        "weight_difference": float(max(np.abs(a - b).max() for a, b in pairs)),
        "weight_movement": float(max(np.abs(step).max() for step in moved)),
    }


def colocated(runner: Runner, *options: str) -> dict[str, Any]:
    """Part 3."""
    arguments = runner.arguments
    shape = ("--shape", arguments.colocated_shape, "--bucket-mb", arguments.bucket_mb)
    found: dict[str, Any] = runner.run(
        "colocated_ranks.py", *runner.engine(), *shape, *options, ranks=2
    )
    return found


def asynchronous(runner: Runner) -> dict[str, Any]:
    """Part 4."""
    arguments = runner.arguments
    found = {}
    for staleness in (0, 1):
        result = runner.run(
            "learning.py",
            *runner.engine(),
            *("--model", arguments.model, "--steps", arguments.steps, "--engine-gpu", 1),
            *("--groups", 32, "--max-staleness", staleness, "--compared", 16),
            *("--evaluations", 1),
        )
        names = ("held_out", "curve", "seconds_a_step", "staleness_mean", "step_seconds")
        found[f"max_staleness {staleness}"] = {name: result[name] for name in names}
    return found


def tensor_parallel(runner: Runner) -> dict[str, Any]:
    """Part 5."""
    return colocated(runner, "--tensor-parallel")


PARTS = {
    "split": split,
    "sharded": sharded,
    "colocated": colocated,
    "asynchronous": asynchronous,
    "tensor_parallel": tensor_parallel,
}


def print_tree(found: Mapping[str, Any], indent: int = 2) -> None:
    """Names and values, one line each; rows of numbers on one line."""
    for name, value in found.items():
        if isinstance(value, Mapping):
            print(f"{'':{indent}}{name}")
            print_tree(value, indent + 2)
        else:
            print(f"{'':{indent}}{name:{44 - indent}}{_text(value)}")


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return " ".join(f"{name} {_text(part)}" for name, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--python", type=Path, help="Python of the engine's environment")
    parser.add_argument("--model", type=Path, help="SmolLM2, as for learning.py")
    parser.add_argument(
        "--shapes", nargs="+", default=["qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b"]
    )
    parser.add_argument("--colocated-shape", default="qwen2.5-1.5b")
    parser.add_argument("--bucket-mb", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20, help="of the asynchronous part")
    parser.add_argument("--cases", type=json.loads, default=SHARDED, help="JSON, of sharded")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    if "asynchronous" in arguments.parts and arguments.model is None:
        parser.error("the part asynchronous trains a real model: name it with --model")
    result: dict[str, Any] = {**card(), "engine": arguments.engine}
    print(f"{arguments.engine}, 2 x {result['card']}")
    with tempfile.TemporaryDirectory() as name:
        runner = Runner(arguments, Path(name))
        for part in arguments.parts:
            began = time.perf_counter()
            try:
                found = PARTS[part](runner)
            except subprocess.CalledProcessError as error:
                found = {"failed": f"exit status {error.returncode}"}
            result[part] = found
            print(f"{part} ({time.perf_counter() - began:.0f} s)", flush=True)
            print_tree(found)
    if arguments.json:
        print(json.dumps(result))
    if any("failed" in result[part] for part in arguments.parts):
        sys.exit(1)


if __name__ == "__main__":
    main()
