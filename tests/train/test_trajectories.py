"""Episodes on disk come back exactly, whole files only, readable by others."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceABC
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.train.token_text import TokenText
from agentrl.train.trajectories import read_rows, read_trajectories, write_trajectories
from agentrl.types import Sequence, StopReason, Timings, Trajectory, Turn


def sequence(
    spans: SequenceABC[tuple[int, int]], length: int, *, logprobs: SequenceABC[float] | None
) -> Sequence:
    mask = np.zeros(length, dtype=np.bool_)
    turns = []
    for index, (start, end) in enumerate(spans):
        mask[start:end] = True
        turns.append(
            Turn(start, end, "stop", reward=None if index % 2 else 0.1 * index, cached_tokens=start)
        )
    values = None
    if logprobs is not None:
        values = np.full(length, np.nan, dtype=np.float32)
        values[mask] = np.array(logprobs, dtype=np.float32)[: int(mask.sum())]
    return Sequence(
        token_ids=np.arange(length) * 7,
        response_mask=mask,
        logprobs=values,
        weight_versions=np.where(mask, 3, -1),
        turns=tuple(turns),
    )


def same(one: Trajectory, other: Trajectory) -> bool:
    plain = [
        (t.reward, t.score, t.stop_reason, t.example_id, t.group_id, t.rollout_id, t.timings)
        for t in (one, other)
    ]
    rest = [(dict(t.metrics), t.messages, t.error, len(t.sequences)) for t in (one, other)]
    return (
        plain[0] == plain[1]
        and rest[0] == rest[1]
        and all(
            a.turns == b.turns
            and all(
                _same_array(getattr(a, name), getattr(b, name))
                for name in ("token_ids", "response_mask", "logprobs", "weight_versions")
            )
            for a, b in zip(one.sequences, other.sequences, strict=True)
        )
    )


def _same_array(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


SCORED = Trajectory(
    sequences=(
        sequence([(2, 4), (6, 9)], 10, logprobs=[-0.1, -1e-30, -3.3333333, -0.0, -17.25]),
        sequence([], 3, logprobs=None),
    ),
    reward=0.1 + 0.2,
    score=1.0,
    stop_reason=StopReason.DONE,
    example_id="7",
    group_id="7/0",
    rollout_id="7/0/3",
    metrics={"tool_calls": 2.0, "odd": 1 / 3},
    timings=Timings(queue=0.5, engine=1.25, env=1e-9),
    messages=({"role": "user", "content": "¿qué? 你好 😀"}, {"role": "assistant", "content": None}),
)
BROKEN = Trajectory(
    sequences=(), reward=None, stop_reason=StopReason.ENV_ERROR, error="Traceback\n  ...\nBoom"
)


def test_a_trajectory_comes_back_exactly(tmp_path: Path) -> None:
    path = write_trajectories(tmp_path / "trajectories", 12, [SCORED, BROKEN])
    assert path.name == "000012.parquet"
    back = read_trajectories(path)
    assert [same(a, b) for a, b in zip(back, [SCORED, BROKEN], strict=True)] == [True, True]


@settings(max_examples=30, deadline=None)
@given(
    spans=st.lists(st.integers(1, 4), max_size=4),
    logprobs=st.lists(st.floats(width=32, allow_nan=False, max_value=0), min_size=16, max_size=16),
    reward=st.none() | st.floats(allow_nan=False, allow_infinity=False),
)
def test_any_trajectory_comes_back_exactly(
    tmp_path_factory: pytest.TempPathFactory,
    spans: list[int],
    logprobs: list[float],
    reward: float | None,
) -> None:
    starts = np.cumsum([1, *[width + 1 for width in spans]]).tolist()
    pairs = [(start, start + width) for start, width in zip(starts, spans, strict=False)]
    trajectory = Trajectory(
        sequences=(sequence(pairs, starts[-1] + 1, logprobs=logprobs),),
        reward=reward,
        stop_reason=StopReason.MAX_TURNS,
    )
    path = write_trajectories(tmp_path_factory.mktemp("t"), 0, [trajectory])
    assert same(read_trajectories(path)[0], trajectory)


def test_pandas_reads_one_row_an_episode(tmp_path: Path) -> None:
    path = write_trajectories(tmp_path, 1, [SCORED, BROKEN])
    frame = pd.read_parquet(path)
    assert frame["stop_reason"].tolist() == ["done", "env_error"]
    assert frame["reward"].iloc[0] == 0.1 + 0.2
    assert math.isnan(frame["reward"].iloc[1])


def test_only_the_first_episodes_get_the_text_of_their_tokens(tmp_path: Path) -> None:
    path = write_trajectories(
        tmp_path, 1, [SCORED, SCORED], token_texts=lambda ids: [f"<{i}>" for i in ids], with_texts=1
    )
    first, second = read_rows(path)
    assert first["sequences"][1]["token_texts"] == ["<0>", "<7>", "<14>"]
    assert second["sequences"][0]["token_texts"] is None


def test_a_message_that_json_cannot_hold_is_described(tmp_path: Path) -> None:
    odd = Trajectory(
        sequences=(), reward=0.0, stop_reason=StopReason.DONE, messages=({"content": {1, 2}},)
    )
    path = write_trajectories(tmp_path, 1, [odd])
    assert read_trajectories(path)[0].messages == ({"content": "{1, 2}"},)


class ByteTokenizer:
    """One token a byte, and like SentencePiece it drops a space at the very beginning."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(text.encode())

    def decode(
        self,
        token_ids: SequenceABC[int],
        *,
        skip_special_tokens: bool,
        clean_up_tokenization_spaces: bool,
    ) -> str:
        return bytes(token_ids).decode(errors="replace").removeprefix(" ")


@pytest.mark.parametrize("text", [" a b", "é", "x€y", "😀😀 ok", "é€😀"])
def test_token_texts_join_to_the_text_and_split_no_character(text: str) -> None:
    ids = list(text.encode())
    texts = TokenText(ByteTokenizer())(ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == text


def test_bytes_that_are_no_character_stay_marked() -> None:
    assert TokenText(ByteTokenizer())([0x61, 0xE2, 0x82, 0x62]) == ["a", "\ufffd", "\ufffd", "b"]


def test_text_that_utf8_cannot_hold_is_spelled_out_and_loses_no_episode(tmp_path: Path) -> None:
    failed = Trajectory(
        sequences=(),
        reward=None,
        stop_reason=StopReason.ENV_ERROR,
        example_id="a\udcff",
        messages=({"role": "user", "content": "b\udcff é"},),
        error="c\udcff",
    )
    (row,) = read_rows(write_trajectories(tmp_path, 1, [failed]))
    assert row["example_id"] == r"a\udcff"
    assert r"b\udcff é" in row["messages"]
    (back,) = read_trajectories(tmp_path / "000001.parquet")
    assert back.messages == failed.messages
    assert back.error == r"c\udcff"
