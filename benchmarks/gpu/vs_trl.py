"""A GRPO step of agentrl against one of TRL's GRPOTrainer on the same GPU, which both sample on.

A step is 16 prompts of 512 tokens with 8 samples of exactly 256 tokens each, and one optimizer step
on all of them. The model has the shape of a public one and random weights, but for one direction in
its head that tells even ids from odd ones, and learns to write even ones; both rewards are printed.
A step lasts from the last score of one batch to the last score of the next, as the task itself sees
it (`../vs_trl_task.py`); the first, which warms up, does not count. `step_time_ratio` is the median
step of TRL over that of agentrl. Each side runs in a process of its own, one after the other, and
every figure goes to stderr when it is there.

The same on both sides: prompts, groups and tokens (a response is as long as `min_tokens` and
`max_tokens`), temperature 1, GRPO with a group's standard deviation, the mean over all tokens, one
optimizer step a batch, AdamW, clipping, no KL term, no gradient checkpointing, liger-kernel's
layers but not its losses; vLLM's release, its share of the GPU, its most tokens and requests of one
pass, its prefix cache, and sleep level 2 while learning (`--no-sleep`: nothing leaves the GPU).

TRL runs vLLM in its own process (`vllm_mode="colocate"`) and learns from `--micro-batch` sequences
at a time. Its correction of what sampler and learner disagree on, which it applies by default, is
off: agentrl's `algo.correction.kind` is none by default, and neither then needs one more forward
pass. It asks for the log-probability of every sampled token, which cannot be turned off; agentrl
asks on its default share of the episodes. TRL's weights, gradients and moments are float32, and it
computes in bfloat16 under autocast, which is its default; with `--trl-weights bfloat16` all of them
are bfloat16, which is faster and keeps no small update. agentrl computes with bfloat16 weights and
steps float32 ones beside them. Its vLLM is a server, of which `--api-servers` processes answer, and
its weights travel by CUDA IPC. With `--engine sglang` it samples from SGLang, so that what the two
sides have in common of vLLM's is then TRL's alone. On both sides the learner stays on the GPU while
the engine samples; with `--offload` agentrl's waits in host memory meanwhile, which is its default
and nothing that TRL can do. It computes a prompt once for its group, `--max-tokens-per-gpu` tokens
at a time.

    python benchmarks/gpu/vs_trl.py [--shape qwen2.5-0.5b] [--engine vllm] [--python PYTHON]
        [--trl-python PYTHON] [--sides trl agentrl] [--json]

`--python` is that of agentrl's server, `--trl-python` one with TRL, liger-kernel and vLLM; the
extras `bench` and `liger` have the first two.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # with several, TRL wants a launcher
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from servers import OPTIONS, versions
from shapes import SHAPES, build_model, card, save_folder

from agentrl.train.metrics_file import read_metrics

sys.path.append(str(Path(__file__).parents[1]))
from vs_trl_side import Job, Side, Step, steps_of
from vs_trl_task import Workload

VLLM_TOKENS = 4096
"""Tokens of one pass of vLLM: TRL fixes it."""
SIGN_OF_EVEN = 0.1
"""Added to the first element of the head's row of an even id, taken from that of an odd one."""
PASSES = {"qwen2.5-1.5b": (16, 10240), "qwen2.5-0.5b": (32, 20480)}
"""What fits a pass of the learner: sequences of TRL, computed tokens of agentrl, in both so many
that all passes of a step are alike."""


def trl_settings(arguments: argparse.Namespace, workload: Workload) -> dict[str, Any]:
    """Arguments of GRPOConfig."""
    return {
        "per_device_train_batch_size": arguments.micro_batch,
        "gradient_accumulation_steps": workload.episodes // arguments.micro_batch,
        "model_init_kwargs": {"dtype": arguments.trl_weights},
        "bf16": True,
        "use_liger_kernel": arguments.liger,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_enable_sleep_mode": arguments.sleep,
        "vllm_gpu_memory_utilization": arguments.memory_share,
        "vllm_max_model_length": workload.prompt + workload.response,
        "vllm_importance_sampling_correction": False,
        "generation_kwargs": {"min_tokens": workload.response},
    }


def agentrl_settings(arguments: argparse.Namespace, workload: Workload) -> dict[str, Any]:
    """Sections of the configuration; a server on the CPU, to try it out, has none of the GPU's."""
    engine: dict[str, Any] = {
        "kind": arguments.engine,
        "python": arguments.python,
        "max_num_seqs": workload.episodes,
        "api_server_count": arguments.api_servers,
    }
    train: dict[str, Any] = {"max_tokens_per_gpu": arguments.max_tokens_per_gpu}
    if torch.cuda.is_available():
        engine["extra"] = engine_options(arguments.engine, arguments.memory_share)
        if arguments.sleep:
            engine |= {"enable_sleep": True, "sleep_level": 2}
            train["offload_for_rollouts"] = arguments.offload
    return {
        "model": {"dtype": "bfloat16", "use_liger_kernel": arguments.liger},
        "engine": engine,
        "rollout": {"max_concurrency": workload.episodes},
        "train": train,
    }


def engine_options(kind: str, memory_share: float) -> dict[str, Any]:
    """Of agentrl's server on a GPU; vLLM's are TRL's."""
    if kind == "vllm":
        return {"gpu_memory_utilization": memory_share, "max_num_batched_tokens": VLLM_TOKENS}
    options = {name: value for name, value in OPTIONS[kind].items() if name != "load_format"}
    return options | {"mem_fraction_static": memory_share}


def save_model(shape: str, folder: Path) -> int:
    """Write what both start from; returns its number of parameters."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build_model(shape, device=device)
    with torch.no_grad():
        # Rows of random weights have nothing in common that a few steps could find.
        head_VD = model.get_output_embeddings().weight
        head_VD[::2, 0] += SIGN_OF_EVEN
        head_VD[1::2, 0] -= SIGN_OF_EVEN
    model.save_pretrained(folder)
    save_folder(shape, folder)
    parameters = int(model.num_parameters())
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    return parameters


def run(job: Job, python: str) -> tuple[Side, float]:
    """All steps of one side, and the seconds until its first batch was scored."""
    began, steps = time.perf_counter(), list[Step]()
    for step in steps_of(job, python=python):
        steps.append(step)
        after = step.wall - (steps[-2].wall if len(steps) > 1 else began)
        note = " from the start" if len(steps) == 1 else ", warms up" if len(steps) == 2 else ""
        say(f"{job.framework} batch {len(steps)}: {after:.2f} s{note}, reward {step.reward:.3f}")
    side = Side()
    side.add(steps)
    say(f"{job.framework}: {statistics.median(side.wall):.3f} s a step, median of {len(side.wall)}")
    return side, steps[0].wall - began


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def phase_seconds(metrics: Path) -> dict[str, float]:
    """Where agentrl's steps go: the median of each phase, without the first step."""
    rows = read_metrics(metrics)[1:]
    names = {name for row in rows for name in row if name.startswith("time/")}
    return {
        name.removeprefix("time/"): statistics.median(row.get(name, 0.0) for row in rows)
        for name in sorted(names)
    }


def measure(arguments: argparse.Namespace, workload: Workload, folder: Path) -> dict[str, Any]:
    """Run the sides that are wanted; what was found of each, as far as it came."""
    found: dict[str, Any] = {"parameters": save_model(arguments.shape, folder / "model")}
    settings: Mapping[Literal["trl", "agentrl"], dict[str, Any]] = {
        "trl": trl_settings(arguments, workload),
        "agentrl": agentrl_settings(arguments, workload),
    }
    pythons = {"trl": arguments.trl_python, "agentrl": sys.executable}
    seconds: dict[str, float] = {}
    for name in arguments.sides:
        job = Job(
            framework=name,
            model=str(folder / "model"),
            folder=str(folder / name),
            workload=workload,
            steps=arguments.steps,
            lr=arguments.lr,
            seed=arguments.seed,
            settings=settings[name],
        )
        try:
            side, start = run(job, pythons[name])
        except RuntimeError as error:
            say(str(error))
            found.setdefault("failed", []).append(name)
            continue
        seconds[name] = statistics.median(side.wall)
        found |= {
            f"{name}_step_seconds": seconds[name],
            f"{name}_all_step_seconds": side.wall,
            f"{name}_start_seconds": start,
            f"{name}_reward_first": side.first_rewards[0],
            f"{name}_reward_last": side.last_rewards[0],
        }
        if name == "agentrl":
            phases = phase_seconds(folder / name / "run" / "metrics.jsonl")
            say("agentrl: " + ", ".join(f"{phase} {value:.2f}" for phase, value in phases.items()))
            found["agentrl_phase_seconds"] = phases
    if len(seconds) == 2:
        found["step_time_ratio"] = seconds["trl"] / seconds["agentrl"]
        say(f"step_time_ratio {found['step_time_ratio']:.2f}")
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument(
        "--sides", nargs="+", choices=("trl", "agentrl"), default=["trl", "agentrl"]
    )
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm", help="agentrl's")
    parser.add_argument("--python", help="Python of agentrl's server")
    parser.add_argument(
        "--api-servers", type=int, default=4, help="engine.api_server_count of agentrl's server"
    )
    parser.add_argument("--trl-python", default=sys.executable, help="Python with TRL and vLLM")
    parser.add_argument("--steps", type=int, default=7, help="batches of a side, at least 3")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workload", default="{}", help="JSON with fields of vs_trl_task.Workload")
    parser.add_argument("--micro-batch", type=int, help="sequences of one pass of TRL")
    parser.add_argument("--max-tokens-per-gpu", type=int, help="of one pass of agentrl")
    parser.add_argument("--trl-weights", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--memory-share", type=float, default=0.3, help="of the GPU, the engine's")
    parser.add_argument("--sleep", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--offload", action="store_true", help="agentrl's learner, for rollouts")
    parser.add_argument("--liger", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, help="keep logs and runs in this folder, which is new")
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    micro_batch, tokens = PASSES.get(arguments.shape, (8, 16384))
    arguments.micro_batch = arguments.micro_batch or micro_batch
    arguments.max_tokens_per_gpu = arguments.max_tokens_per_gpu or tokens
    if arguments.offload and not arguments.sleep:
        parser.error("--offload makes room for an engine that sleeps: leave out --no-sleep")
    if arguments.steps < 3:
        parser.error("--steps must be at least 3: the first batch starts, the second warms up")
    return arguments


def main() -> None:
    arguments = parse()
    workload = Workload(
        **{"response": 256, "groups": 16, "scored": "even ids"} | json.loads(arguments.workload)
    )
    if workload.episodes % arguments.micro_batch:
        raise SystemExit(
            f"--micro-batch {arguments.micro_batch} does not divide the {workload.episodes} "
            "sequences of a batch: name one that does"
        )
    # Whoever ends this process ends the side that runs, and its server, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with contextlib.ExitStack() as stack:
        folder = arguments.out or Path(
            stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        )
        result = {
            **card(),
            "agentrl_engine": versions(arguments.python, [arguments.engine]),
            **versions(arguments.trl_python, ["trl", "vllm", "liger_kernel"]),
            "settings": {
                name: str(value) if isinstance(value, Path) else value
                for name, value in vars(arguments).items()
            },
            **measure(arguments, workload, folder),
        }
    for name in arguments.sides:
        if f"{name}_step_seconds" in result:
            print(
                f"{name}: {result[f'{name}_step_seconds']:.3f} s a step, reward "
                f"{result[f'{name}_reward_first']:.3f} to {result[f'{name}_reward_last']:.3f}"
            )
    if "step_time_ratio" in result:
        print(f"{result['step_time_ratio']:.2f} times")
    if arguments.json:
        print(json.dumps(result))
    if "failed" in result:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
