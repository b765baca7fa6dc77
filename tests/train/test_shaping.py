import numpy as np
import pytest
from learner_parts import trajectory

from agentrl.config import RolloutConfig
from agentrl.train.shaping import overlong_penalty, shape_rewards, turn_lengths, turn_sums


@pytest.mark.parametrize(
    ("length", "expected"), [(10, 0.0), (16, 0.0), (17, -0.5), (18, -1.0), (20, -2.0)]
)
def test_the_penalty_rises_over_the_buffer_before_the_limit(length: int, expected: float):
    """A limit of 20, a buffer of 4, a factor of 2 (DAPO, equation 13)."""
    assert overlong_penalty(20 - length, 4, 2.0) == pytest.approx(expected)


def rollout(**settings) -> RolloutConfig:
    return RolloutConfig(overlong_buffer={"len": 2}, **settings)


def test_the_nearer_of_both_limits_counts():
    # turns of 3 and 2 tokens in a sequence of 3 + 2 + 2 + 2 + 1 = 11 tokens with the prompt
    episode = trajectory(1.0, turns=(3, 2))
    length = len(episode.sequences[0])
    for settings, penalty in (
        ({"max_new_tokens": 5, "max_tokens": 100}, 0.0),
        ({"max_new_tokens": 4, "max_tokens": 100}, -0.5),
        ({"max_new_tokens": 3, "max_tokens": 100}, -1.0),
        ({"max_new_tokens": 50, "max_tokens": length + 1}, -0.5),
    ):
        (shaped,), metrics = shape_rewards([episode], rollout(**settings))
        assert shaped.reward == pytest.approx(1.0 + penalty)
        assert metrics["reward/overlong_penalty_mean"] == pytest.approx(penalty)
        assert metrics["reward/overlong_share"] == float(penalty < 0)


def test_the_score_is_the_tasks_own_whatever_the_penalty():
    given = [trajectory(1.0), trajectory(0.3, score=0.0), trajectory(None)]
    shaped, _ = shape_rewards(given, rollout(max_new_tokens=2))
    assert [t.score for t in shaped] == [1.0, 0.0, None]
    assert [t.reward for t in shaped] == [pytest.approx(0.0), pytest.approx(-0.7), None]


def test_without_a_buffer_nothing_changes():
    given = [trajectory(1.0), trajectory(None)]
    assert shape_rewards(given, RolloutConfig()) == (given, {})


def test_turns_are_added_up_in_order_without_the_empty_ones():
    episode = trajectory(3.0, turns=(2, 0, 3))
    assert turn_lengths(episode).tolist() == [2, 3]
    assert turn_sums(np.array([1.0, 2, 4, 8, 16]), turn_lengths(episode)).tolist() == [3, 28]
    assert turn_sums(np.empty(0), turn_lengths(trajectory(1.0, turns=()))).tolist() == []
