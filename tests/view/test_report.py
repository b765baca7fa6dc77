"""The report: one page that loads nothing, escapes everything and stays small."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.config import Config
from agentrl.errors import UsageError
from agentrl.train.metrics import open_metrics
from agentrl.train.rundir import RunDir, write_summary
from agentrl.train.trajectories import write_trajectories
from agentrl.types import Sequence, StopReason, Trajectory, Turn
from agentrl.view import data as view_data
from agentrl.view.curve import moving_mean
from agentrl.view.report import build_report

HOSTILE = "</script><b>bold</b><img src=x onerror=alert(1)>"
TEXTS = ["question ", "lower", HOSTILE, " higher ", "42"]


def trajectory(**changes: Any) -> Trajectory:
    """Five tokens: context, two sampled, context, one sampled."""
    mask = np.array([False, True, True, False, True])
    values: dict[str, Any] = {
        "sequences": (
            Sequence(
                token_ids=np.arange(5),
                response_mask=mask,
                logprobs=np.where(mask, -0.5, np.nan),
                weight_versions=np.where(mask, 3, -1),
                turns=(Turn(1, 3, "stop", reward=0.25), Turn(4, 5, "length")),
            ),
        ),
        "reward": 1.0,
        "stop_reason": StopReason.DONE,
        "rollout_id": HOSTILE,
        "messages": ({"role": "user", "content": HOSTILE},),
    }
    return Trajectory(**{**values, **changes})


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    config = Config.model_validate(
        {
            "agent": "a.py",
            "data": {"path": HOSTILE},
            "log": {"run_dir": tmp_path / "r", "tensorboard": False},
        }
    )
    with RunDir.create(config) as run, open_metrics(run, config) as metrics:
        for step in (1, 2):
            metrics.log(step, {"reward/mean": step / 2, "policy/kl": math.nan})
            write_trajectories(
                run.trajectories,
                step,
                [trajectory(), trajectory()],
                token_texts=lambda ids: [TEXTS[i] for i in ids],
                with_texts=1,
            )
        write_summary(run.path, {"steps": 2, "note": HOSTILE})
    return tmp_path / "r"


class Page(HTMLParser):
    """The tags of a page, its attributes that could load something, and its data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.data: dict[str, Any] = {}
        self._id: str | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = dict(attrs)
        self.loads += [name for name in found if name in ("src", "srcset", "onerror")]
        self.loads += [v for k, v in attrs if k == "href" and not str(v).startswith("#")]  # type: ignore[misc]
        self._id = found.get("id") if tag == "script" else None

    def handle_data(self, data: str) -> None:
        if self._id == "data" and data.strip():
            self.data = json.loads(data)


def test_text_of_models_environments_and_flags_never_becomes_markup(run_dir: Path) -> None:
    page = Page(build_report(run_dir).read_text())
    assert "b" not in page.tags
    assert "img" not in page.tags
    assert page.tags.count("script") == 4
    (episode,) = page.data["episodes"]["steps"][0]["episodes"]
    assert episode["sequences"][0][1]["tokens"] == ["lower", HOSTILE]
    assert episode["messages"] == [{"role": "user", "text": HOSTILE}]


def test_the_page_loads_nothing(run_dir: Path) -> None:
    text = build_report(run_dir).read_text()
    assert Page(text).loads == []
    assert "default-src 'none'" in text
    assert "@import" not in text
    assert "url(" not in text


def test_sampled_tokens_are_told_from_context_and_keep_their_numbers(run_dir: Path) -> None:
    page = Page(build_report(run_dir).read_text())
    first = page.data["episodes"]["steps"][0]["episodes"][0]["sequences"][0]
    assert [segment.get("context") for segment in first] == ["question ", None, " higher ", None]
    assert first[1]["reward"] == 0.25
    assert first[1]["logprobs"] == [-0.5, -0.5]
    assert (first[3]["turn"], first[3]["finish_reason"], first[3]["version"]) == (2, "length", 3)


def test_curves_keep_a_gap_where_a_value_was_not_finite(run_dir: Path) -> None:
    series = Page(build_report(run_dir).read_text()).data["series"]
    assert series == {"reward/mean": [[1, 0.5], [2, 1.0]], "policy/kl": [[1, None], [2, None]]}


def test_the_configuration_and_the_summary_are_on_the_page(run_dir: Path) -> None:
    page = Page(build_report(run_dir).read_text()).data
    assert page["config"]["algo"]["advantage.estimator"] == "grpo"
    assert page["summary"]["steps"] == 2


def test_the_picture_needs_no_display(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    build_report(run_dir)
    assert (run_dir / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_has_not_logged_yet_has_a_page(tmp_path: Path) -> None:
    config = Config.model_validate({"agent": "a.py", "log": {"run_dir": tmp_path / "r"}})
    RunDir.create(config).close()
    page = Page(build_report(tmp_path / "r").read_text())
    assert page.data["series"] == {}
    assert page.data["episodes"] == {"steps_in_run": 0, "steps": []}


def test_a_directory_that_is_no_run_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a run directory"):
        build_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_broken_episode_is_shown_with_its_error(tmp_path: Path, run_dir: Path) -> None:
    broken = trajectory(
        sequences=(), reward=None, stop_reason=StopReason.ENV_ERROR, error="Traceback ... Boom"
    )
    write_trajectories(run_dir / "trajectories", 3, [broken])
    (episode,) = view_data.collect(run_dir)["episodes"]["steps"][2]["episodes"]
    assert (episode["reward"], episode["error"]) == (None, "Traceback ... Boom")


def test_a_long_run_is_thinned_evenly_and_says_so(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(3, 10):
        write_trajectories(run_dir / "trajectories", step, [])
    monkeypatch.setattr(view_data, "MAX_STEPS", 3)
    episodes = view_data.collect(run_dir)["episodes"]
    assert [step["step"] for step in episodes["steps"]] == [1, 5, 9]
    assert episodes["steps_in_run"] == 9


def test_a_long_episode_is_cut_and_says_so(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_data, "MAX_TOKENS", 2 * 2)
    step = view_data.collect(run_dir)["episodes"]["steps"][0]
    (episode,) = step["episodes"]
    assert [len(segment.get("tokens", [])) for segment in episode["sequences"][0]] == [0, 1]
    assert episode["tokens_cut"] == 3


def test_the_moving_mean_looks_back_and_skips_nan() -> None:
    assert moving_mean([1.0, 3.0, math.nan, 5.0], 2) == [1.0, 2.0, 3.0, 5.0]
    assert math.isnan(moving_mean([math.nan], 3)[0])


def test_secrets_of_the_configuration_stay_off_the_page(tmp_path: Path) -> None:
    config = Config.model_validate(
        {
            "agent": "a.py",
            "engine": {"kind": "vllm", "api_key": "hush-1", "env": {"TOKEN": "hush-2"}},
            "log": {"run_dir": tmp_path / "r"},
        }
    )
    RunDir.create(config).close()
    assert "hush" in (tmp_path / "r" / "config.toml").read_text()
    assert "hush" not in build_report(tmp_path / "r").read_text()
