import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.train.advantages import (
    generalized_advantages,
    group_normalized_advantages,
    leave_one_out_advantages,
    reward_to_go,
    turn_level_advantages,
    whiten,
    zero_variance_groups,
)

NAN = math.nan


def test_a_group_is_centred_and_divided_by_its_sample_standard_deviation():
    # mean 2, deviations -2 0 2, sample variance (4 + 0 + 4) / 2 = 4
    advantages = group_normalized_advantages([0, 2, 4], ["g"] * 3)
    np.testing.assert_allclose(advantages, [-1, 0, 1], atol=1e-6)


def test_without_the_standard_deviation_the_difference_from_the_mean_is_kept():
    advantages = group_normalized_advantages([0, 2, 4], ["g"] * 3, normalize_std=False)
    np.testing.assert_array_equal(advantages, [-2, 0, 2])


def test_uneven_groups_are_normalised_each_by_itself():
    """Sizes 4, 3, 4; the middle group is all 5.0 (slime#1414, AReaL#1419)."""
    rewards = [1, 0, 0, 1, 5.0, 5.0, 5.0, 0, 0, 0, 2]
    groups = ["a"] * 4 + ["b"] * 3 + ["c"] * 4
    advantages = group_normalized_advantages(rewards, groups)
    np.testing.assert_array_equal(advantages[4:7], [0, 0, 0])
    # a: mean 1/2, sample variance 4 * (1/4) / 3; c: mean 1/2, (3 * 1/4 + 9/4) / 3 = 1
    np.testing.assert_allclose(advantages[:4], np.array([1, -1, -1, 1]) * math.sqrt(3) / 2, 1e-5)
    np.testing.assert_allclose(advantages[7:], [-0.5, -0.5, -0.5, 1.5], rtol=1e-5)


def test_members_of_a_group_need_not_stand_together():
    """Prompts p1, p2, p1, p2 are not the groups p1, p1, p2, p2 (prime-rl#600)."""
    advantages = group_normalized_advantages(
        [1, 10, 3, 30], ["p1", "p2", "p1", "p2"], normalize_std=False
    )
    np.testing.assert_array_equal(advantages, [-1, -10, 1, 10])


def test_equal_prompts_with_different_group_ids_are_different_groups():
    """Groups are formed by group id (rllm#605, NeMo-RL PR#4013)."""
    advantages = group_normalized_advantages([0, 1, 5, 6], ["0", "0", "1", "1"])
    np.testing.assert_allclose(advantages, np.array([-1, 1, -1, 1]) / math.sqrt(2), rtol=1e-5)


def test_members_without_a_reward_are_no_part_of_the_baseline_and_get_no_gradient():
    """An unset reward is not a 0 that beats an honest -1 (trl#6427)."""
    advantages = group_normalized_advantages([NAN, -1, -1, NAN], ["g"] * 4)
    np.testing.assert_array_equal(advantages, [0, 0, 0, 0])
    advantages = group_normalized_advantages([NAN, 1, 3, NAN], ["g"] * 4, normalize_std=False)
    np.testing.assert_array_equal(advantages, [0, -1, 1, 0])


def test_leaving_one_out_compares_with_the_mean_of_the_other_scored_members():
    # 1 - 3 and 3 - 1; 6 - (0 + 3) / 2 and so on; alone: 0
    rewards = [1, NAN, 3, 6, 0, 3, 7]
    advantages = leave_one_out_advantages(rewards, ["a", "a", "a", "b", "b", "b", "c"])
    np.testing.assert_allclose(advantages, [-2, 0, 2, 4.5, -4.5, 0, 0])


def test_a_turn_that_no_sibling_reached_has_no_baseline_and_no_advantage():
    first, second = turn_level_advantages(
        [np.array([0.0, 5.0]), np.array([1.0])], ["g", "g"], gamma=1.0, normalize_std=False
    )
    np.testing.assert_array_equal(first, [2, 0])
    np.testing.assert_array_equal(second, [-2])


def test_turns_of_other_groups_are_no_siblings():
    result = turn_level_advantages(
        [np.array([r]) for r in (0.0, 2.0, 10.0, 14.0)],
        list("aabb"),
        gamma=1.0,
        normalize_std=False,
    )
    assert [a.tolist() for a in result] == [[-1], [1], [-2], [2]]


def test_groups_without_variance_are_named():
    """A mean strictly between the extremes does not make a spread (OpenRLHF PR#1272)."""
    scores = [0.5, 0.5, 0.5, 0, 1, 0.1, 0.1 + 0.2 - 0.2, NAN, 1, NAN, NAN]
    groups = ["same"] * 3 + ["spread"] * 2 + ["near"] * 2 + ["one"] * 2 + ["none"] * 2
    assert zero_variance_groups(scores, groups) == {"same", "one", "none"}


def test_rewards_that_only_rounding_separates_from_their_mean_give_exactly_zero():
    assert np.mean([0.1] * 3) != 0.1
    np.testing.assert_array_equal(group_normalized_advantages([0.1] * 3, ["g"] * 3), 0)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(-100, 100)), min_size=1, max_size=30),
    st.randoms(use_true_random=False),
)
def test_the_order_of_episodes_does_not_matter(rows, random):
    order = list(range(len(rows)))
    random.shuffle(order)
    groups, rewards = zip(*rows, strict=True)
    advantages = group_normalized_advantages(rewards, groups)
    shuffled = group_normalized_advantages([rewards[i] for i in order], [groups[i] for i in order])
    np.testing.assert_allclose(shuffled, advantages[order], atol=1e-6)


def test_generalized_advantages_of_two_tokens_worked_out_by_hand():
    # deltas: 1 + 0.5 * 2 - 4 = -2 and 3 - 2 = 1; A0 = -2 + 0.5 * 0.5 * 1
    advantages, returns = generalized_advantages([1, 3], [4, 2], gamma=0.5, lam=0.5)
    np.testing.assert_array_equal(advantages, [-1.75, 1.0])
    np.testing.assert_array_equal(returns, [2.25, 3.0])


def test_with_lambda_one_the_return_is_the_discounted_reward():
    _, returns = generalized_advantages([0, 0, 8], [5, -3, 7], gamma=0.5, lam=1.0)
    np.testing.assert_allclose(returns, [2, 4, 8])


def test_with_lambda_zero_the_advantage_is_the_one_step_error():
    advantages, _ = generalized_advantages([1, 2, 3], [1, 1, 1], gamma=1.0, lam=0.0)
    np.testing.assert_array_equal(advantages, [1, 2, 2])


def test_no_tokens_give_no_advantages():
    advantages, returns = generalized_advantages([], [], gamma=1.0, lam=0.9)
    assert advantages.shape == returns.shape == (0,)


def test_reward_to_go_discounts_per_token():
    np.testing.assert_array_equal(reward_to_go([1, 0, 4], gamma=0.5), [2, 2, 4])


def test_whitening_is_over_all_tokens_of_the_batch():
    # tokens 0 2 4 6: mean 3, variance 5; per episode they would come out as -1 1 -1 1
    first, empty, second = whiten([np.array([0.0, 2.0]), np.array([]), np.array([4.0, 6.0])])
    np.testing.assert_allclose(first, np.array([-3, -1]) / math.sqrt(5))
    np.testing.assert_allclose(second, np.array([1, 3]) / math.sqrt(5))
    assert len(empty) == 0


def test_whitening_equal_or_no_tokens_stays_finite():
    np.testing.assert_array_equal(whiten([np.array([2.0, 2.0])])[0], [0, 0])
    assert whiten([]) == []


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_environment_tokens_do_not_discount(gamma: float):
    """Two own tokens are neighbours, however much the environment said between them."""
    advantages, _ = generalized_advantages([0, 1], [0, 0], gamma=gamma, lam=1.0)
    np.testing.assert_allclose(advantages, [gamma, 1])
