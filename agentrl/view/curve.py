"""The learning curve: reward against step with a moving mean, as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from agentrl.train.files import replacing

__all__ = ["moving_mean", "save_curve", "window_for"]

_BLUE, _GREY, _ORANGE = "#2563eb", "#9ca3af", "#d97706"


def moving_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to `window - 1` before it; NaN values have no part in it."""
    means = []
    for end in range(1, len(values) + 1):
        recent = [v for v in values[max(0, end - window) : end] if not math.isnan(v)]
        means.append(sum(recent) / len(recent) if recent else math.nan)
    return means


def window_for(count: int) -> int:
    """How many steps to average over: a tenth of the run, at least 5, at most 50."""
    return min(max(count // 10, 5), 50)


def save_curve(
    path: Path,
    rewards: Sequence[tuple[int, float]],
    evaluations: Sequence[tuple[int, float]] = (),
    *,
    title: str = "",
) -> None:
    """Draw (step, mean reward) pairs of training, and of evaluation, into a PNG.

    Raises:
        SaveError: the picture could not be written.
    """
    # Figure without pyplot draws in memory and asks for no display.
    figure = Figure(figsize=(8, 4.5), dpi=144, layout="constrained")
    axes = figure.subplots()
    steps, values = [step for step, _ in rewards], [value for _, value in rewards]
    axes.plot(steps, values, color=_GREY, linewidth=1, alpha=0.8, label="mean reward of the step")
    window = window_for(len(values))
    axes.plot(
        steps,
        moving_mean(values, window),
        color=_BLUE,
        linewidth=2.2,
        label=f"moving mean over {window} steps",
    )
    if evaluations:
        axes.plot(
            [step for step, _ in evaluations],
            [value for _, value in evaluations],
            color=_ORANGE,
            marker="o",
            markersize=4,
            linewidth=1.2,
            label="evaluation",
        )
    axes.set(title=title, xlabel="training step", ylabel="reward")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    with replacing(path) as scratch:
        figure.savefig(scratch, format="png")
