"""What a person sees while a run goes on: a live panel at a terminal, else one line a step.

Only rank 0 makes one. Progress never ends a run: when nobody reads the output any more (a closed
terminal, a pipe whose reader has gone), it falls silent.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentrl.train.metrics import REWARD
from agentrl.train.streams import unbreakable

__all__ = ["Progress", "sparkline"]

_BARS = "▁▂▃▄▅▆▇█"
_SHOWN_STEPS = 40


class Progress:
    """Counts rollouts, times the phases of a step and shows both."""

    def __init__(self, max_steps: int, *, done_steps: int = 0, out: TextIO | None = None) -> None:
        """Show a run of `max_steps`, of which `done_steps` are behind it (a resumed run)."""
        self._max_steps = max_steps
        self._step = done_steps
        self._console = Console(file=unbreakable(out or sys.stdout))
        self._live: Live | None = None
        self._rewards: list[float] = []
        self._last: Mapping[str, float] = {}
        self._phase = ""
        self._seconds: dict[str, float] = {}
        self._finished = self._wanted = self._tokens = 0
        self._began = time.perf_counter()

    def start(self, title: str = "") -> None:
        """Show the panel, or print `title` where there is no terminal."""
        if title:
            self._console.print(title, highlight=False)
        if self._console.is_terminal:
            self._live = Live(
                console=self._console, get_renderable=self._panel, refresh_per_second=4
            )
            self._live.start()

    def rollouts_wanted(self, count: int) -> None:
        """Begin to count the rollouts of one step, of which `count` are wanted."""
        self._finished, self._wanted, self._tokens = 0, count, 0
        self._began = time.perf_counter()

    def rollout_advanced(self, finished: int = 1, tokens: int = 0) -> None:
        """Count episodes that finished, and the tokens that were sampled for them."""
        self._finished += finished
        self._tokens += tokens

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of the step: rollout, logprobs, update, sync, save, eval."""
        outer, self._phase = self._phase, name
        began = time.perf_counter()
        try:
            yield
        finally:
            self._phase = outer
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

    def phase_seconds(self) -> dict[str, float]:
        """Seconds of each phase of this step so far, named as metrics: `time/rollout`."""
        return {f"time/{name}": seconds for name, seconds in self._seconds.items()}

    def step_done(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the numbers of a finished step and begin to time the next one."""
        self._step = step
        self._last = dict(metrics)
        if REWARD in metrics:
            self._rewards.append(metrics[REWARD])
        self._seconds = {}
        if self._live is None:
            self._console.print(
                _plain_line(step, self._max_steps, metrics), highlight=False, soft_wrap=True
            )

    def note(self, message: str) -> None:
        """Print one line above the panel: a warning, where something was saved."""
        self._console.print(message, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the last state of the panel standing. Safe to call twice."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _panel(self) -> RenderableType:
        bars = Table.grid(padding=(0, 2))
        bars.add_row(
            "step", _bar(self._step, self._max_steps), f"{self._step} of {self._max_steps}"
        )
        rate = self._tokens / max(time.perf_counter() - self._began, 1e-9)
        sampling = f", {rate:,.0f} tok/s" if self._tokens and self._phase == "rollout" else ""
        bars.add_row(
            "rollouts",
            _bar(self._finished, self._wanted),
            f"{self._finished} of {self._wanted}{sampling}",
        )
        phase = Text(f"now: {self._phase or '-'}", style="dim")
        lines: list[RenderableType] = [bars, phase]
        if self._last:
            lines.append(Text(_numbers(self._last)))
        if self._rewards:
            recent = self._rewards[-_SHOWN_STEPS:]
            lines.append(Text(f"reward {sparkline(recent)} {recent[-1]:.3f}", style="green"))
        return Group(*lines)


def sparkline(values: list[float]) -> str:
    """Draw numbers as a row of blocks, the least one lowest; a blank where one is not finite."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return " " * len(values)
    low, span = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join(
        _BARS[round((value - low) / span * (len(_BARS) - 1))] if math.isfinite(value) else " "
        for value in values
    )


def _bar(done: int, total: int) -> ProgressBar:
    return ProgressBar(total=max(total, 1), completed=done, width=32)


def _plain_line(step: int, max_steps: int, metrics: Mapping[str, float]) -> str:
    reward = f"  reward {metrics[REWARD]:.4f}" if REWARD in metrics else ""
    return f"step {step}/{max_steps}{reward}  {_numbers(metrics)}".rstrip()


def _numbers(metrics: Mapping[str, float]) -> str:
    """Speed, then the time of every phase."""
    parts = []
    if "throughput/tokens_per_second" in metrics:
        parts.append(f"{metrics['throughput/tokens_per_second']:,.0f} tok/s")
    times = {k: v for k, v in metrics.items() if k.startswith("time/")}
    parts += [f"{name.removeprefix('time/')} {seconds:.2f}s" for name, seconds in times.items()]
    return "  ".join(parts)
