import math
from itertools import chain
from typing import get_args

import numpy as np
import pytest

from agentrl.config import AdvantageConfig
from agentrl.train.estimators import ESTIMATORS, EpisodeRewards

NAN = math.nan


def rewards(*episodes: list[list[float]], groups: str, trained: str = "") -> EpisodeRewards:
    """Episodes as lists of turns, a turn as what was received after each of its tokens.

    `trained` says of each episode y or n; an episode without turns cannot be scored.
    """
    tokens = [np.array([*chain(*turns)], dtype=np.float64) for turns in episodes]
    trained = trained or "y" * len(episodes)
    return EpisodeRewards(
        rewards_E=np.array([t.sum() if len(t) else NAN for t in tokens]),
        group_ids=list(groups),
        token_rewards=[
            t if y == "y" else np.empty(0) for t, y in zip(tokens, trained, strict=True)
        ],
        turn_rewards=[np.array([sum(turn) for turn in turns]) for turns in episodes],
        turn_lengths=[
            np.array([len(turn) for turn in turns], dtype=np.int64) for turns in episodes
        ],
    )


def advantages(name: str, given: EpisodeRewards, **settings) -> list[list[float]]:
    config = AdvantageConfig(estimator=name, **settings)
    return [a.tolist() for a in ESTIMATORS[name](given, config).advantages]


def test_every_name_of_the_configuration_has_an_estimator():
    field = AdvantageConfig.model_fields["estimator"]
    assert set(get_args(field.annotation)) == set(ESTIMATORS)


ONE_TURN = ([[0, 0]], [[2]], [[0, 0, 4]])


def test_grpo_gives_every_token_the_normalised_difference_from_the_mean():
    # rewards 0 2 4: mean 2, sample standard deviation 2
    first, second, third = advantages("grpo", rewards(*ONE_TURN, groups="ggg"))
    assert first == pytest.approx([-1, -1], abs=1e-6)
    assert second == [0]
    assert third == pytest.approx([1, 1, 1], abs=1e-6)


def test_dr_grpo_is_grpo_without_the_division():
    given = rewards(*ONE_TURN, groups="ggg")
    assert advantages("dr_grpo", given) == [[-2, -2], [0], [2, 2, 2]]
    assert advantages("grpo", given, normalize_std=False) == advantages("dr_grpo", given)


def test_rloo_compares_with_the_mean_of_the_others():
    # 0 - (2 + 4) / 2, 2 - (0 + 4) / 2, 4 - (0 + 2) / 2
    assert advantages("rloo", rewards(*ONE_TURN, groups="ggg")) == [[-3, -3], [0], [3, 3, 3]]


def test_reinforce_plus_plus_discounts_per_token_and_normalises_over_the_batch():
    given = rewards([[0, 4]], [[0]], groups="ab")
    assert advantages("reinforce_plus_plus", given, gamma=0.5, whiten=False) == [[2, 4], [0]]
    # 2 4 0: mean 2, variance 8/3
    first, second = advantages("reinforce_plus_plus", given, gamma=0.5)
    assert first == pytest.approx([0, 2 / math.sqrt(8 / 3)])
    assert second == pytest.approx([-2 / math.sqrt(8 / 3)])


def test_reinforce_plus_plus_baseline_takes_the_groups_mean_and_then_normalises_over_tokens():
    given = rewards([[0]], [[2]], [[1, 5]], groups="aab")
    name = "reinforce_plus_plus_baseline"
    assert advantages(name, given, whiten=False) == [[-1], [1], [0, 0]]
    # -1 1 0 0: mean 0, variance 1/2
    assert advantages(name, given)[1] == pytest.approx([math.sqrt(2)])


def test_a_turn_is_credited_with_what_came_after_it_against_the_same_turn_of_its_siblings():
    # returns to come: 1 + 2 = 3, 2 and 0 + 6 = 6, 6; the means of the turns are 4.5 and 4
    given = rewards([[0, 1], [2]], [[0], [0, 6]], groups="gg")
    assert advantages("turn_level", given, normalize_std=False) == [[-1.5, -1.5, -2], [1.5, 2, 2]]


def test_turns_are_discounted_whatever_their_lengths():
    # 0 + 0.5 * 4 = 2 and 4, against 0 + 0.5 * 0 and 0
    given = rewards([[0, 0, 0], [0, 4]], [[0], [0]], groups="gg")
    result = advantages("turn_level", given, gamma=0.5, normalize_std=False)
    assert result == [[1, 1, 1, 2, 2], [-1, -2]]


def test_an_episode_that_had_ended_is_no_part_of_a_later_turns_baseline():
    # turn 0: 1, 4, 10 (mean 5); turn 1: 4 and 10 alone (mean 7)
    given = rewards([[1]], [[0], [4]], [[0], [10]], groups="ggg")
    result = advantages("turn_level", given, normalize_std=False)
    assert result == [[-4], [-1, -3], [5, 3]]


def test_turns_are_normalised_by_the_deviation_of_their_own_index():
    # turn 0: 2 and 6 (mean 4, deviation sqrt 8); turn 1: equal, so exactly 0
    given = rewards([[0], [2]], [[4], [2]], groups="gg")
    first, second = advantages("turn_level", given)
    assert first == pytest.approx([-1 / math.sqrt(2), 0], abs=1e-6)
    assert second == pytest.approx([1 / math.sqrt(2), 0], abs=1e-6)


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - {"gae"}))
def test_an_episode_that_is_not_trained_counts_in_baselines_and_has_no_advantages(name: str):
    given = rewards([[1]], [[3]], [], groups="ggg", trained="yny")
    first, cut, unscored = advantages(name, given)
    assert (len(first), cut, unscored) == (1, [], [])
    if AdvantageConfig(estimator=name).compares_groups and name != "reinforce_plus_plus_baseline":
        assert first[0] < 0


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - {"gae"}))
def test_no_episode_gives_no_advantages(name: str):
    assert advantages(name, rewards(groups="")) == []
