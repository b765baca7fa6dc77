"""Finished episodes on disk: one Parquet file a step, one row an episode, exact.

    trajectories/000012.parquet        the episodes of training step 12
    trajectories/eval-000012.parquet   those of the evaluation after it
    trajectories/unfinished/           those of a long step that is not done (see `episode_log`)

pandas, datasets and DuckDB read the files. Ids, masks, log-probabilities (NaN included), versions
and rewards come back bit for bit; `messages` and `metrics` are JSON in a string column. Parquet
holds float32 and NaN as they are, and writes nine times as fast as compressed JSON at the same
size (262,000 tokens: 0.07 s and 1.4 MB against 0.65 s and 1.4 MB).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.train.files import replacing
from agentrl.types import Sequence, StopReason, Timings, Trajectory, Turn

__all__ = [
    "cut_trajectories",
    "read_rows",
    "read_trajectories",
    "step_of",
    "trajectory_file",
    "trajectory_files",
    "write_rows",
    "write_trajectories",
]

TokenTexts = Callable[[SequenceABC[int]], list[str]]
"""Gives the text of every token, such that the joined texts are the decoded sequence."""

_FILE_NAME = re.compile(r"(eval-)?\d{6,}\.parquet")

_TURN = pa.struct(
    [
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("finish_reason", pa.string()),
        ("reward", pa.float64()),
        ("cached_tokens", pa.int32()),
        ("temperature", pa.float64()),
    ]
)
_SEQUENCE = pa.struct(
    [
        ("token_ids", pa.list_(pa.int32())),
        ("response_mask", pa.list_(pa.bool_())),
        ("logprobs", pa.list_(pa.float32())),
        ("weight_versions", pa.list_(pa.int32())),
        ("turns", pa.list_(_TURN)),
        ("token_texts", pa.list_(pa.string())),
    ]
)
_SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("example_id", pa.string()),
        ("group_id", pa.string()),
        ("rollout_id", pa.string()),
        ("reward", pa.float64()),
        ("score", pa.float64()),
        ("stop_reason", pa.string()),
        ("num_turns", pa.int32()),
        ("num_sampled", pa.int32()),
        ("queue_seconds", pa.float64()),
        ("engine_seconds", pa.float64()),
        ("env_seconds", pa.float64()),
        ("metrics", pa.string()),
        ("messages", pa.string()),
        ("error", pa.string()),
        ("sequences", pa.list_(_SEQUENCE)),
    ]
)


def write_trajectories(
    folder: Path,
    step: int,
    trajectories: SequenceABC[Trajectory],
    *,
    evaluation: bool = False,
    token_texts: TokenTexts | None = None,
    with_texts: int = 0,
) -> Path:
    """Write the episodes of one step as one file, whole or not at all, and return its path.

    The first `with_texts` episodes also get the text of every token, which the report shows.

    Raises:
        SaveError: the file could not be written.
    """
    path = trajectory_file(folder, step, evaluation=evaluation)
    write_rows(path, step, trajectories, token_texts=token_texts, with_texts=with_texts)
    return path


def write_rows(
    path: Path,
    step: int | None,
    trajectories: SequenceABC[Trajectory],
    *,
    token_texts: TokenTexts | None = None,
    with_texts: int = 0,
) -> None:
    """Write episodes to `path`, whole or not at all; `step` None: they belong to none yet.

    Raises:
        SaveError: the file could not be written.
    """
    rows = [
        _to_row(step, trajectory, token_texts if index < with_texts else None)
        for index, trajectory in enumerate(trajectories)
    ]
    with replacing(path) as scratch:
        pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), scratch, compression="zstd")


def read_trajectories(path: Path) -> list[Trajectory]:
    """Read one file back as the trajectories that were written."""
    return [_from_row(row) for row in read_rows(path)]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read one file as plain rows, `token_texts` included."""
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


def trajectory_file(folder: Path, step: int, *, evaluation: bool = False) -> Path:
    """Where the episodes of a step lie."""
    return folder / f"{'eval-' if evaluation else ''}{step:06d}.parquet"


def step_of(path: Path) -> int:
    """The step that a file of episodes belongs to."""
    return int(path.stem.removeprefix("eval-"))


def trajectory_files(folder: Path) -> list[Path]:
    """The files of episodes in a folder; another's files that lie there are none of ours."""
    return [path for path in folder.glob("*.parquet") if _FILE_NAME.fullmatch(path.name)]


def cut_trajectories(folder: Path, last_step: int) -> None:
    """Remove the files of steps after `last_step`."""
    for path in trajectory_files(folder):
        if step_of(path) > last_step:
            path.unlink()


def _to_row(
    step: int | None, trajectory: Trajectory, token_texts: TokenTexts | None
) -> dict[str, Any]:
    timings = trajectory.timings
    return {
        "step": step,
        "example_id": _writable(trajectory.example_id),
        "group_id": trajectory.group_id,
        "rollout_id": trajectory.rollout_id,
        "reward": trajectory.reward,
        "score": trajectory.score,
        "stop_reason": str(trajectory.stop_reason),
        "num_turns": trajectory.num_turns,
        "num_sampled": trajectory.num_sampled,
        "queue_seconds": timings.queue,
        "engine_seconds": timings.engine,
        "env_seconds": timings.env,
        "metrics": json.dumps({name: float(v) for name, v in trajectory.metrics.items()}),
        # A message may hold what JSON cannot (an image): its description is better than a crash
        # after the episode was paid for, and nothing is trained on it.
        "messages": _writable(json.dumps(trajectory.messages, ensure_ascii=False, default=repr)),
        "error": None if trajectory.error is None else _writable(trajectory.error),
        "sequences": [_sequence_row(sequence, token_texts) for sequence in trajectory.sequences],
    }


def _writable(text: str) -> str:
    """`text` with lone surrogates, which bytes of a file name become in Python, spelled out."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _sequence_row(sequence: Sequence, token_texts: TokenTexts | None) -> dict[str, Any]:
    return {
        "token_ids": sequence.token_ids,
        "response_mask": sequence.response_mask,
        "logprobs": sequence.logprobs,
        "weight_versions": sequence.weight_versions,
        "turns": [
            {
                "start": turn.start,
                "end": turn.end,
                "finish_reason": turn.finish_reason,
                "temperature": turn.temperature,
                "reward": turn.reward,
                "cached_tokens": turn.cached_tokens,
            }
            for turn in sequence.turns
        ],
        "token_texts": token_texts(sequence.token_ids.tolist()) if token_texts else None,
    }


def _from_row(row: dict[str, Any]) -> Trajectory:
    return Trajectory(
        sequences=tuple(_from_sequence_row(sequence) for sequence in row["sequences"]),
        reward=row["reward"],
        stop_reason=StopReason(row["stop_reason"]),
        example_id=row["example_id"],
        group_id=row["group_id"],
        rollout_id=row["rollout_id"],
        score=row["score"],
        metrics=json.loads(row["metrics"]),
        timings=Timings(
            queue=row["queue_seconds"], engine=row["engine_seconds"], env=row["env_seconds"]
        ),
        messages=tuple(json.loads(row["messages"])),
        error=row["error"],
    )


def _from_sequence_row(row: dict[str, Any]) -> Sequence:
    logprobs = row["logprobs"]
    return Sequence(
        token_ids=np.array(row["token_ids"], dtype=np.int32),
        response_mask=np.array(row["response_mask"], dtype=np.bool_),
        logprobs=None if logprobs is None else np.array(logprobs, dtype=np.float32),
        weight_versions=np.array(row["weight_versions"], dtype=np.int32),
        turns=tuple(Turn(**turn) for turn in row["turns"]),
    )
