"""Learner and engines on two GPUs of one host, in every arrangement; prints a table and JSON.

| part | arrangement | what is measured |
| --- | --- | --- |
| split | learner on GPU 0, servers on GPU 1, transport nccl, for every engine | seconds of an update and GB/s beside a bare broadcast of as many bytes; what requests in flight wait for; greedy output against the model |
| asynchronous | learner on GPU 0, server on GPU 1 | `learning.py` with `--max-staleness` 0 and 1: seconds a step, reward |
| sharded | ZeRO-3 over both GPUs, no server | losses and weights against one GPU's; tokens per second and memory |
| colocated | both, an engine on each rank's GPU, then one engine on both (tensor parallel); ipc, sleep | seconds and memory by phase; log-probabilities of each engine against the learner |

    python benchmarks/gpu/two_gpus.py --engine vllm sglang --python VLLM_PYTHON SGLANG_PYTHON \\
        --model SMOLLM2.gguf [--parts split sharded ...] [--json]

All parts but `split` have the first engine. Each runs in processes of its own. They begin early,
import what they need, start their servers, and wait for their turn, so that all parts take less than
nine minutes: the servers of `split` and `asynchronous` start on GPU 1 while GPU 0 alone trains the
cases of `sharded`, and those of `colocated` during `asynchronous`, whose steps are few and short
enough on a host with many cores for that. What a part printed goes to stderr; one that fails is
said so, and the others run.
"""  # noqa: E501

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from shapes import card
from split_placement import WAITS

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


class Script:
    """A script beside this one that has begun; it prepares itself, then waits for its turn."""

    def __init__(self, command: Sequence[object], out: Path, *, ranks: int) -> None:
        """Begin it, alone or under torchrun on so many ranks."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
        script, *options = command
        line = [sys.executable, *(torchrun if ranks else []), HERE / str(script), *options]
        self._name, self._out = str(script), out
        self._process = subprocess.Popen(
            [*map(str, line), "--out", str(out)], stdin=subprocess.PIPE, stdout=sys.stderr
        )

    def prepare(self) -> None:
        """Return when it waits for its turn, or has failed."""
        while not self._out.with_suffix(WAITS).exists() and self._process.poll() is None:
            time.sleep(0.1)

    def finish(self) -> dict[str, Any]:
        """Give it its turn; the JSON that it leaves.

        Raises:
            subprocess.CalledProcessError: it failed.
        """
        self._process.communicate()  # ends its standard input
        if self._process.returncode:
            raise subprocess.CalledProcessError(self._process.returncode, self._name)
        found: dict[str, Any] = json.loads(self._out.read_text())
        return found

    def end(self) -> None:
        """End it if it runs still."""
        self._process.terminate()
        self._process.wait()


class Runner:
    """Begins scripts, ends those that are left, and notes the seconds from one lap to the next."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.seconds: dict[str, float] = {}
        self._began = self._lap = time.perf_counter()
        self._folder = tempfile.TemporaryDirectory()
        self._scripts: list[Script] = []

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for script in self._scripts:
            script.end()
        self._folder.cleanup()

    def begin(self, *command: object, ranks: int = 0) -> Script:
        """Begin a script with its options."""
        out = Path(self._folder.name) / f"{len(self._scripts)}.json"
        script = Script(command, out, ranks=ranks)
        self._scripts.append(script)
        return script

    def prepare(self) -> None:
        """Return when every script that has begun waits for its turn or has ended."""
        for script in self._scripts:
            script.prepare()

    def lap(self, name: str) -> float:
        """End a lap, which is called `name`; the seconds since the beginning."""
        now = time.perf_counter()
        self.seconds[name] = now - self._lap
        self._lap = now
        return now - self._began

    def engine(self, index: int = 0) -> list[object]:
        """The options that say which engine."""
        python = self.arguments.python
        return [
            *("--engine", self.arguments.engine[index]),
            *(["--python", python[index]] if python else []),
        ]


def begin_split(runner: Runner) -> dict[str, Script]:
    """Part 1: the servers of each engine, and the broadcasts."""
    arguments = runner.arguments
    settings = ("--bucket-mb", arguments.bucket_mb, "--shapes", *arguments.shapes)
    scripts = {
        name: runner.begin("split_placement.py", *runner.engine(index), *settings)
        for index, name in enumerate(arguments.engine)
    }
    return scripts | {"bare": runner.begin("bare_broadcast.py", *arguments.shapes, ranks=2)}


def split(scripts: Mapping[str, Script]) -> dict[str, Any]:
    """Part 1, engine by engine."""
    found = {name: attempt(script.finish) for name, script in scripts.items()}
    bare = found.pop("bare")
    if "failed" in bare:
        return found | {"bare": bare}
    for rows in found.values():
        for shape, row in rows.items() if "failed" not in rows else ():
            row["bare_seconds"] = bare[shape]
            row["gigabytes_per_second"] = row["bytes"] / row["update"] / 1e9
            row["bare_gigabytes_per_second"] = row["bytes"] / row["bare_seconds"] / 1e9
            row["share_of_bare"] = row["bare_seconds"] / row["update"]
    return found


def begin_asynchronous(runner: Runner) -> Script:
    """Part 2: its server and its learners."""
    arguments = runner.arguments
    settings = {
        "model": arguments.model,
        "steps": arguments.steps,
        "groups": arguments.groups,
        "examples": arguments.examples,
    }
    flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
    return runner.begin("ahead_of_training.py", *runner.engine(), *flags)


def begin_sharded(runner: Runner, ranks: int) -> Script:
    """Part 3, on one GPU (0 ranks) or on both."""
    return runner.begin("sharded_learner.py", *map(json.dumps, runner.arguments.cases), ranks=ranks)


def sharded(one: Mapping[str, Any], two: Script) -> dict[str, Any]:
    """Part 3, given what one GPU made of it."""
    if "failed" in one:
        return dict(one)
    return {name: compare(one[name], found) for name, found in two.finish().items()}


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


def begin_colocated(runner: Runner) -> Script:
    """Part 4: its servers, and the learner beside them."""
    arguments = runner.arguments
    settings = ("--shape", arguments.colocated_shape, "--sequences", arguments.sequences)
    return runner.begin("colocated_ranks.py", *runner.engine(), *settings, ranks=2)


PARTS = ("split", "asynchronous", "sharded", "colocated")


def attempt(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a part gives, or that it failed."""
    try:
        return call()
    except subprocess.CalledProcessError as error:
        return {"failed": f"{error.cmd} ended with status {error.returncode}"}


def has_failed(found: Mapping[str, Any]) -> bool:
    """Whether a part, or a part of it, failed."""
    return "failed" in found or any(
        has_failed(part) for part in found.values() if isinstance(part, Mapping)
    )


def measure(runner: Runner) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each part's name and results, as they come."""
    parts = runner.arguments.parts
    alone = begin_sharded(runner, ranks=0) if "sharded" in parts else None
    both = begin_sharded(runner, ranks=2) if "sharded" in parts else None
    apart = begin_split(runner) if "split" in parts else None
    asynchronous = begin_asynchronous(runner) if "asynchronous" in parts else None
    one = attempt(alone.finish) if alone is not None else {}
    runner.prepare()
    runner.lap("start")
    if apart is not None:
        yield "split", split(apart)
    colocated = begin_colocated(runner) if "colocated" in parts else None
    if asynchronous is not None:
        yield "asynchronous", attempt(asynchronous.finish)
    if colocated is not None:
        colocated.prepare()
        runner.lap("start of colocated")
    if both is not None:
        yield "sharded", attempt(partial(sharded, one, both))
    if colocated is not None:
        yield "colocated", attempt(colocated.finish)


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


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--engine", nargs="+", choices=("vllm", "sglang"), default=["vllm"])
    parser.add_argument("--python", type=Path, nargs="+", help="of each engine's environment")
    parser.add_argument("--model", type=Path, help="SmolLM2, as for learning.py")
    parser.add_argument(
        "--shapes", nargs="+", default=["qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b"]
    )
    parser.add_argument("--colocated-shape", default="qwen2.5-1.5b")
    parser.add_argument("--sequences", type=int, default=8, help="of an update of colocated")
    parser.add_argument("--bucket-mb", type=int, default=4096, help="of the part split")
    parser.add_argument("--steps", type=int, default=8, help="of the part asynchronous")
    parser.add_argument("--groups", type=int, default=16, help="questions of such a step")
    parser.add_argument("--examples", type=int, default=256, help="questions there are")
    parser.add_argument("--cases", type=json.loads, default=SHARDED, help="JSON, of sharded")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    if lack := missing(arguments):
        parser.error(lack)
    return arguments


def missing(arguments: argparse.Namespace) -> str | None:
    """What the parts need and is not there."""
    if torch.cuda.device_count() == 1 and arguments.parts != ["split"]:
        return (
            "two GPUs are needed, and torch sees one: look at CUDA_VISIBLE_DEVICES, or try "
            "--parts split, whose two sides then share it"
        )
    if len(arguments.engine) > 1 and "split" not in arguments.parts:
        return "only the part split is measured with more than one engine: name one"
    if arguments.python and len(arguments.python) != len(arguments.engine):
        return "--python names one Python for each --engine, in their order"
    if "asynchronous" in arguments.parts:
        if arguments.model is None or not arguments.model.exists():
            return "the part asynchronous trains a real model, which must exist: see --model"
        if arguments.model.suffix == ".gguf" and importlib.util.find_spec("gguf") is None:
            return "reading --model needs the package gguf: pip install 'agentrl[gguf]'"
    if set(arguments.parts) == {"sharded"}:
        return None
    pythons = arguments.python or [sys.executable] * len(arguments.engine)
    for engine, python in zip(arguments.engine, pythons, strict=True):
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({engine!r}) is None)"
        if not python_runs(python, code):
            return f"{python} has no package {engine}: see --python"
    return None


def python_runs(python: Path, code: str) -> bool:
    """Whether there is such a Python, and it runs the code without an error."""
    try:
        return subprocess.run([python, "-c", code], check=False).returncode == 0
    except OSError:
        return False


def main() -> None:
    arguments = parse()
    result: dict[str, Any] = {**card(), "engine": ", ".join(arguments.engine)}
    gpus = torch.cuda.device_count()
    print(f"{result['engine']}, {min(gpus, 2)} x {result['card']}", flush=True)
    if gpus < 2:
        print(
            f"{gpus} GPUs are seen: this tries the scripts out, its seconds mean nothing",
            flush=True,
        )
    with Runner(arguments) as runner:
        for part, found in measure(runner):
            result[part] = found
            print(f"{part} (until second {runner.lap(part):.0f})", flush=True)
            print_tree(found)
    result["seconds"] = {**runner.seconds, "whole": sum(runner.seconds.values())}
    print("seconds")
    print_tree(result["seconds"])
    if arguments.json:
        print(json.dumps(result))
    if has_failed(result):
        sys.exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends what has begun
    main()
