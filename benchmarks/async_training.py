"""What rollouts ahead of training give: the same run with `train.max_staleness` 0 and 1.

The quickstart's tiny model learns to guess numbers. Environments take log-normal times; the engine
is a process that stands in for vLLM, samples from the real weights with plain forward passes, and
waits some milliseconds for each token, so that latencies are those of a larger model. Both runs
have the same settings, correction included. Throughput is that of the steps after the first three,
from the end of one to the end of the last, as the files of episodes were written.

    python benchmarks/async_training.py [--json] [--steps 40] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).parent
FAKE = HERE.parent / "tests" / "engines" / "fake"
WARM_UP = 3
LAST = 5
"""So many steps are the end of a run."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run. `waiting_seconds` is how long a step waits for its batch, mean; `reward_last` the
    mean over the last steps; `staleness_mean` in versions, over all trained tokens."""

    steps_per_minute: float
    tokens_per_second: float
    waiting_seconds: float
    update_seconds: float
    staleness_mean: float
    reward_last: float
    rewards: list[float]


@dataclass(frozen=True, slots=True)
class Result:
    """The figures that are printed."""

    steps: int
    token_seconds: float
    max_staleness_0: Run
    max_staleness_1: Run
    throughput_1_over_0: float


def command(run_dir: Path, max_staleness: int, arguments: argparse.Namespace) -> list[str]:
    """The command line of one run."""
    return [
        *(sys.executable, "-m", "agentrl", "train"),
        *("--agent", str(HERE / "async_training_agent.py"), "--log.run_dir", str(run_dir)),
        *("--engine.kind", "vllm", "--engine.transport", "gloo"),
        *("--engine.env", json.dumps({"PYTHONPATH": str(FAKE)})),
        *("--engine.extra", json.dumps({"token_seconds": arguments.token_seconds})),
        *("--rollout.batch_size", str(arguments.batch_size)),
        *("--rollout.n_samples_per_prompt", "8", "--rollout.max_turns", "4"),
        *("--rollout.max_new_tokens", "3", "--rollout.max_tokens", "128"),
        *("--algo.correction.kind", "tis", "--algo.entropy_coef", "0.01"),
        *("--algo.advantage.drop_zero_variance", "false"),
        *("--train.lr", "3e-3", "--train.mini_batches", "4", "--train.shuffle", "episodes"),
        *("--train.ppo_epochs", "2", "--train.max_steps", str(arguments.steps)),
        *("--train.max_staleness", str(max_staleness), "--train.seed", str(arguments.seed)),
    ]


def run(folder: Path, max_staleness: int, arguments: argparse.Namespace) -> Run:
    """Train once and read what it left."""
    run_dir = folder / f"staleness-{max_staleness}"
    done = subprocess.run(
        command(run_dir, max_staleness, arguments), capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"the run with max_staleness {max_staleness} failed:\n{done.stderr}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    ends = [
        (run_dir / "trajectories" / f"{step:06d}.parquet").stat().st_mtime
        for step in (WARM_UP, arguments.steps)
    ]
    seconds, measured = ends[1] - ends[0], lines[WARM_UP:]
    episodes = arguments.batch_size * 8
    tokens = sum(line["length/response_mean"] * episodes for line in measured)
    rewards = [line["reward/mean"] for line in lines]
    return Run(
        steps_per_minute=60 * len(measured) / seconds,
        tokens_per_second=tokens / seconds,
        waiting_seconds=statistics.mean(line["time/rollout"] for line in measured),
        update_seconds=statistics.mean(line["time/update"] for line in measured),
        staleness_mean=statistics.mean(line["staleness/mean"] for line in measured),
        reward_last=statistics.mean(rewards[-LAST:]),
        rewards=rewards,
    )


def main() -> None:
    """Train twice and print a table; with --json one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=8, help="groups of 8 episodes")
    parser.add_argument("--token-seconds", type=float, default=0.02, help="of one request")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="async-training-") as folder:
        runs = [run(Path(folder), staleness, arguments) for staleness in (0, 1)]
    result = Result(
        steps=arguments.steps,
        token_seconds=arguments.token_seconds,
        max_staleness_0=runs[0],
        max_staleness_1=runs[1],
        throughput_1_over_0=runs[1].steps_per_minute / runs[0].steps_per_minute,
    )
    for name in ("steps_per_minute", "tokens_per_second", "waiting_seconds", "update_seconds",
                 "staleness_mean", "reward_last"):  # fmt: skip
        print(f"{name:24}{getattr(runs[0], name):>12,.3f}{getattr(runs[1], name):>12,.3f}")
    for step, pair in enumerate(zip(runs[0].rewards, runs[1].rewards, strict=True), 1):
        print(f"reward, step {step:<11}{pair[0]:>12,.3f}{pair[1]:>12,.3f}")
    print(f"{'throughput_1_over_0':24}{result.throughput_1_over_0:>12,.3f}")
    if arguments.json:
        print(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
