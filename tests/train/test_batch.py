from dataclasses import replace

import numpy as np
import pytest
from learner_parts import trajectory

from agentrl.train.batch import (
    Sample,
    build_samples,
    episode_token_rewards,
    join_episodes,
    split_episodes,
)
from agentrl.types import Sequence, StopReason, Trajectory, Turn


def sequence(ids: list[int], turns: list[tuple[int, int, float | None]]) -> Sequence:
    mask = np.zeros(len(ids), dtype=bool)
    for start, end, _ in turns:
        mask[start:end] = True
    return Sequence(
        token_ids=ids,
        response_mask=mask,
        logprobs=np.where(mask, -np.arange(len(ids)) / 10, np.nan),
        weight_versions=np.where(mask, 0, -1),
        turns=tuple(Turn(start, end, "stop", reward) for start, end, reward in turns),
    )


def test_a_sample_holds_the_sampled_positions_and_nothing_after_the_last():
    ids = [5, 6, 7, 8, 9, 10, 11]
    episode = Trajectory((sequence(ids, [(2, 3, None), (4, 6, None)]),), 1.0, StopReason.DONE)
    (sample,) = build_samples([episode], [0])
    assert sample.token_ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert sample.positions.tolist() == [2, 4, 5]
    np.testing.assert_allclose(sample.sampler_logprobs, [-0.2, -0.4, -0.5])
    assert sample.num_inputs == 5


def test_a_sample_knows_the_temperature_of_each_token_and_which_were_drawn_at_random():
    turns = (Turn(1, 3, "stop", temperature=0.7), Turn(4, 5, "stop", temperature=0.0))
    whole = replace(sequence(list(range(6)), [(1, 3, None), (4, 5, None)]), turns=turns)
    (sample,) = build_samples([Trajectory((whole,), 1.0, StopReason.DONE)], [0])
    np.testing.assert_allclose(sample.temperatures, [0.7, 0.7, 0])
    assert sample.at_random.tolist() == [True, True, False]
    assert sample.num_trained == 2


def test_only_the_named_episodes_become_samples_and_keep_their_index():
    episodes = [trajectory(1.0), trajectory(0.0), trajectory(2.0)]
    assert [sample.episode for sample in build_samples(episodes, [0, 2])] == [0, 2]


def test_a_sequence_without_sampled_tokens_makes_no_sample():
    episode = Trajectory((sequence([1, 2], []), sequence([1, 2], [(1, 2, None)])), 1.0,
                         StopReason.DONE)  # fmt: skip
    assert len(build_samples([episode], [0])) == 1


def test_a_sampled_first_token_is_refused_because_nothing_predicts_it():
    episode = Trajectory((sequence([1, 2], [(0, 2, None)]),), 1.0, StopReason.DONE)
    with pytest.raises(ValueError, match="first token"):
        build_samples([episode], [0])


def test_fields_of_another_length_are_refused():
    sample = Sample(np.array([1, 2]), np.array([1]))
    with pytest.raises(ValueError, match="advantages has shape"):
        sample.with_fields(advantages=[1.0, 2.0])


def test_a_reward_without_turn_rewards_is_received_after_the_last_token():
    assert episode_token_rewards(trajectory(3.0, turns=(2, 1))).tolist() == [0, 0, 3]


def test_turn_rewards_are_received_after_their_turns_and_the_rest_at_the_end():
    episode = trajectory(3.0, turns=(2, 1, 2), turn_rewards=(0.5, None, 1.0))
    assert episode_token_rewards(episode).tolist() == [0, 0.5, 0, 0, 2.5]


def test_rewards_run_on_over_the_sequences_of_an_episode():
    parts = (sequence([1, 2, 3], [(1, 2, 0.25)]), sequence([1, 2, 3], [(2, 3, 0.75)]))
    assert episode_token_rewards(Trajectory(parts, 1.0, StopReason.DONE)).tolist() == [0.25, 0.75]


def test_arrays_of_samples_are_joined_by_episode_and_split_again():
    samples = [Sample(np.arange(4), np.array([1, 3]), episode=e) for e in (2, 0, 2)]
    arrays = [np.array([1.0, 2.0]), np.array([3.0, 4.0]), np.array([5.0, 6.0])]
    joined = join_episodes(arrays, samples, 3)
    assert [list(array) for array in joined] == [[3, 4], [], [1, 2, 5, 6]]
    for part, array in zip(split_episodes(joined, samples), arrays, strict=True):
        np.testing.assert_array_equal(part, array)
