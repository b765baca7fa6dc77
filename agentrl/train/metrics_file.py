"""metrics.jsonl: one JSON object a line, one line a step, floats exact.

JSON has no NaN: a value that is not finite is written as null and read back as NaN. A line is
flushed as a whole; what a crash left of one is not a step and is left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from agentrl.train.files import replace_text

__all__ = ["cut_metrics", "format_line", "read_metrics"]


def format_line(step: int, metrics: Mapping[str, float]) -> str:
    """One line, newline included. Python writes floats so that reading gives the same bits.

    Raises:
        ValueError: a metric is called `step`.
    """
    if "step" in metrics:
        raise ValueError("a metric cannot be called 'step': that key holds the step's number")
    return json.dumps({"step": step, **{name: _plain(v) for name, v in metrics.items()}}) + "\n"


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Read every whole line, in order; the key `step` is among the values. No file: no lines."""
    if not path.is_file():
        return []
    rows: list[dict[str, float]] = []
    for _, values in _whole_lines(path):
        rows.append({name: math.nan if v is None else v for name, v in values.items()})
    return rows


def cut_metrics(path: Path, last_step: int) -> None:
    """Keep the lines of steps up to `last_step`, and whole lines only; atomic.

    Raises:
        SaveError: the file could not be written; it is as it was.
    """
    if not path.is_file():
        return
    kept = [line for line, values in _whole_lines(path) if values["step"] <= last_step]
    replace_text(path, "".join(kept))


def _whole_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every line that is a step's, newline included, and what it says."""
    # A disk that was switched off may leave any bytes behind.
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            values = json.loads(line)
        except ValueError:
            continue
        if line.endswith("\n") and isinstance(values, dict) and type(values.get("step")) is int:
            yield line, values


def _plain(value: float) -> float | int | None:
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
