"""Episodes are on disk soon after they ended, and in the end each is in one file."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path

import pandas
import pytest
from learner_parts import trajectory

from agentrl.train import episode_log
from agentrl.train.episode_log import EpisodeLog, clear_unfinished
from agentrl.train.trajectories import read_trajectories
from agentrl.types import Trajectory


def episode(name: str) -> Trajectory:
    return replace(trajectory(1.0, seed=3), rollout_id=name, group_id=name)


def written(folder: Path) -> list[list[str]]:
    """The episodes of each part."""
    parts = sorted((folder / "unfinished").glob("*"))
    return [[t.rollout_id for t in read_trajectories(part)] for part in parts]


async def test_what_ended_in_a_long_step_is_written_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_log, "EVERY", 0.01)
    log = EpisodeLog(tmp_path)
    log.add(episode("a"))
    log.add(episode("b"))
    await asyncio.sleep(0.02)
    assert written(tmp_path) == [["a", "b"]]
    log.add(episode("c"))
    log.flush()
    assert written(tmp_path) == [["a", "b"], ["c"]]
    (part, _) = sorted((tmp_path / "unfinished").glob("*"))
    (exact, _) = read_trajectories(part)
    assert exact.sequences[0].token_ids.tolist() == episode("a").sequences[0].token_ids.tolist()
    rows = pandas.read_parquet(tmp_path / "unfinished")
    assert rows["rollout_id"].tolist() == ["a", "b", "c"]
    assert rows["step"].isna().all()


async def test_a_part_goes_when_all_its_episodes_are_in_files_of_steps(tmp_path: Path) -> None:
    log = EpisodeLog(tmp_path)
    log.add(episode("a"))
    log.add(episode("b"))
    log.flush()
    log.settle([episode("a")])
    assert written(tmp_path) == [["a", "b"]]
    log.add(episode("c"))
    log.settle([episode("b"), episode("c")])
    assert written(tmp_path) == []
    log.flush()
    assert written(tmp_path) == []  # a short step leaves no part


async def test_episodes_that_could_not_be_written_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "unfinished").write_text("in the way")
    log = EpisodeLog(tmp_path)
    log.add(episode("a"))
    with caplog.at_level(logging.WARNING):
        log.flush()
    assert "episodes wait to be written: could not write" in caplog.text
    (tmp_path / "unfinished").unlink()
    log.add(episode("b"))
    log.flush()
    assert written(tmp_path) == [["a", "b"]]
    clear_unfinished(tmp_path)
    assert written(tmp_path) == []
