"""Mean, standard error and pass@k of an evaluation, on numbers worked out by hand."""

from __future__ import annotations

import json
import math

import pytest

from agentrl.train.eval_result import pass_at_k, summarize
from agentrl.types import StopReason, Trajectory
from agentrl.view.eval_table import print_eval


def episode(group: str, reward: float | None, score: float | None = None) -> Trajectory:
    stop = StopReason.ENV_ERROR if reward is None else StopReason.DONE
    return Trajectory(
        sequences=(), reward=reward, score=score, stop_reason=stop, group_id=group, rollout_id=group
    )


def test_mean_and_standard_error_are_over_examples_not_episodes() -> None:
    # Means of the examples: 1, 0 and 0.5; their standard deviation is 0.5.
    result = summarize([episode("a", 1.0), episode("a", 1.0), episode("b", 0.0), episode("c", 0.5)])
    assert result.reward_mean == 0.5
    assert result.reward_stderr == pytest.approx(0.5 / math.sqrt(3))


def test_an_infrastructure_failure_is_counted_and_never_averaged() -> None:
    result = summarize([episode("a", 1.0), episode("a", None), episode("b", None)])
    assert result.reward_mean == 1.0
    assert (result.examples, result.episodes, result.unscored) == (2, 3, 2)
    assert result.stop_reasons == {"env_error": 2, "done": 1}


def test_pass_at_k_is_the_unbiased_estimate() -> None:
    # Four samples, one right: pass@2 = 1 - C(3, 2) / C(4, 2) = 1 / 2.
    assert pass_at_k([[1.0, 0.0, 0.0, 0.0]]) == {1: 0.25, 2: 0.5, 4: 1.0}
    # An example with one sample has no part in pass@2 and pass@3.
    assert pass_at_k([[0.0, 0.0, 1.0], [1.0]]) == pytest.approx({1: 2 / 3, 2: 2 / 3, 3: 1.0})
    assert pass_at_k([]) == {}


def test_pass_at_k_judges_by_the_tasks_own_score() -> None:
    assert summarize([episode("a", 7.0, score=0.0)]).pass_at_k == {1: 0.0}


def test_json_is_one_object_without_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_eval(summarize([episode("a", None)]), as_json=True)
    printed = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert printed["reward_mean"] is None
    assert printed["stop_reasons"] == {"env_error": 1}


def test_the_table_shows_every_number(capsys: pytest.CaptureFixture[str]) -> None:
    print_eval(summarize([episode("a", 1.0), episode("b", 0.0)]))
    shown = capsys.readouterr().out
    for words in ("mean reward", "0.5", "standard error", "pass@1", "stopped: done", "2 (100%)"):
        assert words in shown
