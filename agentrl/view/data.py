"""What the report shows, gathered from a run directory as plain values that fit JSON.

A page must stay small enough to open: at most `MAX_STEPS` steps' episodes are taken, spread evenly
over the run, and at most `MAX_TOKENS` tokens of them. The page says what was left out.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import UsageError
from agentrl.settings import without_secrets
from agentrl.train.metrics_file import read_metrics
from agentrl.train.trajectories import read_rows, step_of, trajectory_files

__all__ = ["collect"]

MAX_STEPS = 40
MAX_TOKENS = 400_000


def collect(run_dir: Path) -> dict[str, Any]:
    """Gather title, summary, configuration, curves and episodes of one run.

    Raises:
        UsageError: `run_dir` is not a run directory.
    """
    if not (run_dir / "config.toml").is_file():
        raise UsageError(
            f"{run_dir} is not a run directory: it holds no config.toml; give the directory that "
            "`agentrl train` named"
        )
    rows = read_metrics(run_dir / "metrics.jsonl")
    return {
        "title": run_dir.resolve().name,
        "summary": _summary(run_dir / "summary.json"),
        "config": _sections(tomllib.loads((run_dir / "config.toml").read_text(encoding="utf-8"))),
        "series": _series(rows),
        "episodes": _episodes(run_dir / "trajectories"),
    }


def _summary(path: Path) -> dict[str, Any]:
    """The summary of a finished run; empty while it goes on."""
    if not path.is_file():
        return {}
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return summary


def _sections(config: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Section -> dotted key within it -> value; what stands in no section comes first."""
    config = without_secrets(config)
    own = {name: str(value) for name, value in config.items() if not isinstance(value, dict)}
    inner = {name: _flat(value) for name, value in config.items() if isinstance(value, dict)}
    return {"run": own, **inner}


def _flat(node: dict[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in node.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = str(value)
    return flat


def _series(rows: Sequence[dict[str, float]]) -> dict[str, list[tuple[int, float | None]]]:
    """Metric -> (step, value) where it was logged; None where it was not finite."""
    series: dict[str, list[tuple[int, float | None]]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step":
                series.setdefault(name, []).append((int(row["step"]), _finite(value)))
    return series


def _episodes(folder: Path) -> dict[str, Any]:
    files = sorted(trajectory_files(folder), key=lambda path: (step_of(path), path.name))
    chosen = _spread(files, MAX_STEPS)
    share = MAX_TOKENS // max(len(chosen), 1)
    return {
        "steps_in_run": len(files),
        "steps": [_step(path, share) for path in chosen],
    }


def _spread(files: Sequence[Path], most: int) -> list[Path]:
    """Pick at most `most` files, evenly spaced, the first and the last among them."""
    if len(files) <= most:
        return list(files)
    return [files[round(i * (len(files) - 1) / (most - 1))] for i in range(most)]


def _step(path: Path, tokens: int) -> dict[str, Any]:
    rows = read_rows(path)
    shown = []
    for row in rows:
        if tokens <= 0:
            break
        if any(sequence["token_texts"] is not None for sequence in row["sequences"]):
            shown.append(_episode(row, tokens))
            tokens -= sum(len(sequence["token_ids"]) for sequence in row["sequences"])
        elif not row["sequences"] and row["error"]:
            shown.append(_episode(row, tokens))
    return {
        "step": step_of(path),
        "evaluation": path.name.startswith("eval-"),
        "episodes_in_step": len(rows),
        "episodes": shown,
    }


def _episode(row: dict[str, Any], tokens: int) -> dict[str, Any]:
    sequences, cut = [], 0
    for sequence in row["sequences"]:
        length = len(sequence["token_ids"])
        sequences.append(_segments(sequence, min(length, max(tokens, 0))))
        cut += max(length - max(tokens, 0), 0)
        tokens -= length
    names = ("example_id", "group_id", "rollout_id", "stop_reason", "num_turns", "num_sampled")
    return {
        **{name: row[name] for name in (*names, "reward", "score", "error")},
        "seconds": {name: row[f"{name}_seconds"] for name in ("queue", "engine", "env")},
        "metrics": {name: _finite(v) for name, v in json.loads(row["metrics"]).items()},
        "messages": [_message(message) for message in json.loads(row["messages"])],
        "sequences": sequences,
        "tokens_cut": cut,
    }


def _segments(sequence: dict[str, Any], end: int) -> list[dict[str, Any]]:
    """Split the first `end` tokens into what the policy was told and what it sampled."""
    texts = sequence["token_texts"]
    segments: list[dict[str, Any]] = []
    position = 0
    for index, turn in enumerate(sorted(sequence["turns"], key=lambda turn: int(turn["start"]))):
        start, stop = min(turn["start"], end), min(turn["end"], end)
        if start > position:
            segments.append({"context": "".join(texts[position:start])})
        if stop > start:
            logprobs = sequence["logprobs"]
            segments.append(
                {
                    "turn": index + 1,
                    "reward": _finite(turn["reward"]),
                    "finish_reason": turn["finish_reason"],
                    "cached_tokens": turn["cached_tokens"],
                    "version": sequence["weight_versions"][start],
                    "tokens": texts[start:stop],
                    "logprobs": logprobs and [round(v, 3) for v in logprobs[start:stop]],
                }
            )
        position = max(position, stop)
    if end > position:
        segments.append({"context": "".join(texts[position:end])})
    return segments


def _message(message: dict[str, Any]) -> dict[str, str]:
    """A chat message as role and text; what is more than text is shown as JSON."""
    content = message.get("content")
    text = content if isinstance(content, str) else ""
    rest = {k: v for k, v in message.items() if k not in ("role", "content") and v}
    if content and not isinstance(content, str):
        rest = {"content": content, **rest}
    if rest:
        text += ("\n" if text else "") + json.dumps(rest, ensure_ascii=False, indent=1)
    return {"role": str(message.get("role", "")), "text": text}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
