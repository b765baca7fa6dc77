"""What `vs_trl.py` and `gpu/vs_trl.py` share: running one side in a process of its own, its steps.

A run ends as soon as its last batch is scored: the update after that is no whole step, and what a
framework saves at the end takes longer than all steps where a model is large.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from vs_trl_task import MARK, Workload

__all__ = ["Job", "Side", "Step", "steps_of"]

RUN = Path(__file__).with_name("vs_trl_run.py")
LAST = 5
"""So many steps are the end of a run."""
SECONDS_TO_END = 30.0
LOG_LINES = 40


@dataclass(frozen=True, slots=True)
class Job:
    """One run of one framework; see `vs_trl_run.py`."""

    framework: Literal["trl", "agentrl"]
    model: str
    folder: str
    workload: Workload
    steps: int
    lr: float
    seed: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """The end of a step's sampling: clocks of the wall and of the processor in seconds (all threads
    of the process), and the mean reward."""

    wall: float
    cpu: float
    reward: float


@dataclass(slots=True)
class Side:
    """All steps of one framework: seconds of the wall and of the processor, rewards."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    first_rewards: list[float] = field(default_factory=list)
    last_rewards: list[float] = field(default_factory=list)

    def add(self, steps: list[Step]) -> None:
        """Take the steps of one run; the first, from the start to the second batch, warms up."""
        for before, after in pairwise(steps[1:]):
            self.wall.append(after.wall - before.wall)
            self.cpu.append(after.cpu - before.cpu)
        self.first_rewards.append(steps[0].reward)
        self.last_rewards.append(statistics.mean(step.reward for step in steps[-LAST:]))


def steps_of(job: Job, *, python: str = sys.executable) -> Iterator[Step]:
    """Train in a process of its own; give every step as it comes, `job.steps` in all.

    What the process prints is in `log.txt` of its folder.

    Raises:
        RuntimeError: the process ended before; its last lines are in the message.
    """
    folder = Path(job.folder)
    folder.mkdir(parents=True, exist_ok=True)
    log_path, count = folder / "log.txt", 0
    with log_path.open("w") as log, _process(python, job, log) as process:
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            log.flush()
            if line.startswith(MARK):
                yield Step(**json.loads(line.removeprefix(MARK)))
                count += 1
            if count == job.steps:
                return
    lines = log_path.read_text(errors="replace").splitlines()[-LOG_LINES:]
    raise RuntimeError("\n".join([f"{job.framework} ended after {count} steps:", *lines]))


@contextmanager
def _process(python: str, job: Job, log: Any) -> Iterator[subprocess.Popen[str]]:
    """Start the run; end it when the block is left."""
    command = [python, str(RUN), json.dumps(asdict(job))]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=log, text=True, errors="replace"
    ) as process:
        try:
            yield process
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """Ask twice, which ends agentrl now with the servers that it started; then insist."""
    for _ in range(2):
        process.terminate()
        try:
            process.communicate(timeout=0.5)
            return
        except subprocess.TimeoutExpired:
            continue
    try:
        process.communicate(timeout=SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
