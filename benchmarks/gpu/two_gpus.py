"""Learner and engines on two GPUs of one host, in every arrangement; prints a table and JSON.

| part | arrangement | what is measured |
| --- | --- | --- |
| split | learner on GPU 0, servers on GPU 1, transport nccl | seconds of an update and GB/s beside a bare broadcast of as many bytes; what requests in flight wait for; greedy output against the model |
| sharded | ZeRO-3 over both GPUs, no server | losses and weights against one GPU's; tokens per second and memory |
| colocated | both, an engine on each rank's GPU, then one engine on both (tensor parallel); ipc, sleep | seconds and memory by phase; log-probabilities of each engine against the learner |
| asynchronous | learner on GPU 0, server on GPU 1 | `learning.py` with `--max-staleness` 0 and 1: seconds a step, reward |

    python benchmarks/gpu/two_gpus.py --engine vllm --python PYTHON --model SMOLLM2.gguf \\
        [--parts split sharded ...] [--json]

Each part runs in processes of its own, one after another; but the servers of `split` and
`asynchronous` start, on GPU 1, while `sharded` runs on GPU 0 alone, so that all parts take less than
nine minutes. What a part printed goes to stderr; one that fails is said so, and the others run.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
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
    {"name": "7b", "shape": "qwen2.5-7b", "gradient_checkpointing": True, "fits_one": False},
)
"""The cases of `sharded_learner.py`. Weights, gradients and states of the last are 128 GiB, beside
which an H200 has no room for activations (it was tried)."""


class Runner:
    """Runs the scripts beside this one and reads what they found."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self._folder, self._count = arguments, folder, 0

    def run(self, script: str, *options: object, ranks: int = 0) -> Any:
        """The JSON that a script left: alone, or under torchrun on so many ranks.

        Raises:
            subprocess.CalledProcessError: it failed.
        """
        return self.begin(script, *options, ranks=ranks)()

    def begin(self, script: str, *options: object, ranks: int = 0) -> Callable[[], Any]:
        """Begin a script; the result ends its standard input and gives what `run` does."""
        self._count += 1
        out = self._folder / f"{self._count}.json"
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        command = [sys.executable, *(torchrun if ranks else []), HERE / script, *options]
        process = subprocess.Popen(
            [*map(str, command), "--out", str(out)], stdin=subprocess.PIPE, stdout=sys.stderr
        )

        def result() -> Any:
            process.communicate()
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, script)
            return json.loads(out.read_text())

        return result

    def engine(self) -> list[object]:
        """The options that say which engine."""
        python = self.arguments.python
        return ["--engine", self.arguments.engine, *(["--python", python] if python else [])]


def begin_split(runner: Runner) -> Callable[[], Any]:
    """Start the servers of part 1."""
    arguments = runner.arguments
    return runner.begin(
        "split_placement.py",
        *runner.engine(),
        *("--bucket-mb", arguments.bucket_mb, "--shapes", *arguments.shapes),
    )


def split(runner: Runner, finish: Callable[[], Any]) -> dict[str, Any]:
    """Part 1, once its servers are begun."""
    found: dict[str, Any] = finish()
    sizes = sorted({row["bytes"] for row in found.values()})
    bare = runner.run("bare_broadcast.py", *sizes, ranks=2)
    for row in found.values():
        row["bare_seconds"] = bare[str(row["bytes"])]
        row["gigabytes_per_second"] = row["bytes"] / row["update"] / 1e9
        row["bare_gigabytes_per_second"] = row["bytes"] / row["bare_seconds"] / 1e9
        row["share_of_bare"] = row["bare_seconds"] / row["update"]
    return found


def on_one(runner: Runner) -> dict[str, Any]:
    """The cases of part 2 on one GPU."""
    found: dict[str, Any] = runner.run(
        "sharded_learner.py", *map(json.dumps, runner.arguments.cases)
    )
    return found


def sharded(runner: Runner, one: Mapping[str, Any]) -> dict[str, Any]:
    """Part 2, given what one GPU made of it."""
    cases = map(json.dumps, runner.arguments.cases)
    two = runner.run("sharded_learner.py", *cases, ranks=2)
    return {name: compare(one[name], two[name]) for name in two}


def compare(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    """Two runs of one case: rates of both, and how far their results are apart.

    `weight_difference` and `weight_movement` are the largest absolute values over the elements that
    were kept: between the two runs after the last update, and of what the updates did.
    """
    rates = ("seconds", "tokens_per_second", "tflops", "peak_gib", "out_of_memory", "left_out")
    found: dict[str, Any] = {
        "one": {name: one[name] for name in rates if name in one},
        "two": {name: two[name] for name in rates if name in two},
    }
    if "losses" not in one:
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


def colocated(runner: Runner) -> dict[str, Any]:
    """Parts 3 and 5."""
    arguments = runner.arguments
    shape = ("--shape", arguments.colocated_shape)
    found: dict[str, Any] = runner.run("colocated_ranks.py", *runner.engine(), *shape, ranks=2)
    return found


def begin_asynchronous(runner: Runner) -> Callable[[], Any]:
    """Start the server of part 4."""
    arguments = runner.arguments
    model = ("--model", arguments.model, "--steps", arguments.steps)
    return runner.begin("ahead_of_training.py", *runner.engine(), *model)


PARTS = ("split", "sharded", "colocated", "asynchronous")


def attempt(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a part gives, or that it failed."""
    try:
        return call()
    except subprocess.CalledProcessError as error:
        return {"failed": f"{error.cmd} ended with status {error.returncode}"}


def measure(runner: Runner, parts: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each part's name and results, as they come."""
    finish_split = begin_split(runner) if "split" in parts else None
    finish_asynchronous = begin_asynchronous(runner) if "asynchronous" in parts else None
    one = attempt(partial(on_one, runner)) if "sharded" in parts else None
    if finish_split is not None:
        yield "split", attempt(partial(split, runner, finish_split))
    if finish_asynchronous is not None:
        yield "asynchronous", attempt(finish_asynchronous)
    if one is not None:
        yield "sharded", one if "failed" in one else attempt(partial(sharded, runner, one))
    if "colocated" in parts:
        yield "colocated", attempt(partial(colocated, runner))


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
    parser.add_argument("--bucket-mb", type=int, default=4096, help="of the part split")
    parser.add_argument("--steps", type=int, default=12, help="of the asynchronous part")
    parser.add_argument("--cases", type=json.loads, default=SHARDED, help="JSON, of sharded")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    if "asynchronous" in arguments.parts and arguments.model is None:
        parser.error("the part asynchronous trains a real model: name it with --model")
    result: dict[str, Any] = {**card(), "engine": arguments.engine}
    print(f"{arguments.engine}, 2 x {result['card']}")
    with tempfile.TemporaryDirectory() as name:
        runner = Runner(arguments, Path(name))
        began = time.perf_counter()
        for part, found in measure(runner, arguments.parts):
            result[part] = found
            print(f"{part} (until second {time.perf_counter() - began:.0f})", flush=True)
            print_tree(found)
    if arguments.json:
        print(json.dumps(result))
    if any("failed" in result[part] for part in arguments.parts):
        sys.exit(1)


if __name__ == "__main__":
    main()
