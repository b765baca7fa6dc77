"""What a batch of episodes trains, and what it must not, through the whole update."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from learner_parts import full_logprobs, make_config, random_sample, small_llama, trajectory

from agentrl.train.batch import build_samples
from agentrl.train.learner import Learner
from agentrl.train.update import policy_update
from agentrl.types import Generation, Sequence, StopReason, Trajectory, Turn

KEEP_EQUAL = {"advantage": {"drop_zero_variance": False}}
TRAIN = {"lr": 1e-2}


def update(trajectories, **sections) -> tuple[dict[str, float], torch.Tensor]:
    """(metrics, how far every weight moved)."""
    config = make_config(**{"train": TRAIN, **sections})
    learner = Learner(small_llama(), config)
    before = torch.cat([w.flatten().clone() for _, w in learner.named_weights()])
    metrics = policy_update(learner, trajectories, config)
    after = torch.cat([w.flatten().clone() for _, w in learner.named_weights()])
    learner.close()
    return metrics, after - before


def test_an_unset_reward_does_not_beat_an_honest_minus_one():
    """trl#6427: [None, -1, -1, None]; as zeros the unset members would have won."""
    rewards = [None, -1.0, -1.0, None]
    episodes = [trajectory(reward, seed=seed) for seed, reward in enumerate(rewards)]
    metrics, moved = update(episodes, algo=KEEP_EQUAL)
    assert metrics["policy/tokens_trained"] == 2 * 4
    assert metrics["advantage/mean"] == metrics["advantage/std"] == 0.0
    assert metrics["policy/grad_norm"] == 0.0
    assert not moved.any()
    assert metrics["group/unscored_share"] == 0.5


def test_a_group_of_three_halves_is_dropped():
    """OpenRLHF PR#1272: [.5, .5, .5] passed a filter that looked at the mean."""
    metrics, moved = update([trajectory(0.5, seed=seed) for seed in range(3)])
    assert metrics["group/zero_variance"] == 1
    assert metrics["policy/tokens_trained"] == 0
    assert not moved.any()


def test_a_middle_group_of_equal_rewards_gets_no_gradient():
    """slime#1414, AReaL#1419: sizes 4, 3, 4; a stride of 4 gave the middle group -1.09."""
    sizes = {"a": [1, 0, 0, 1], "b": [5.0, 5.0, 5.0], "c": [0, 0, 0, 2]}
    episodes = [
        trajectory(float(reward), group=group, seed=10 * number + member)
        for number, (group, rewards) in enumerate(sizes.items())
        for member, reward in enumerate(rewards)
    ]
    with_middle, moved = update(episodes, algo=KEEP_EQUAL)
    dropped, _ = update(episodes)
    assert with_middle["policy/tokens_trained"] == 11 * 4
    assert dropped["policy/tokens_trained"] == 8 * 4
    assert with_middle["advantage/mean"] == pytest.approx(0.0, abs=1e-6)
    # Variance 3/4 for every member of a and of c, none of b: 8 * (3/4) / 11.
    assert with_middle["advantage/std"] ** 2 == pytest.approx(6 / 11, rel=1e-4)
    assert moved.any()


def test_interleaved_members_train_as_those_that_stand_together():
    """prime-rl#600: [p1, p2, p1, p2] was cut as [p1, p1] and [p2, p2]."""
    episodes = [
        trajectory(reward, group=group, seed=seed)
        for seed, (reward, group) in enumerate([(1, "p1"), (10, "p2"), (3, "p1"), (30, "p2")])
    ]
    mixed, moved = update(episodes)
    sorted_by_group, same = update([episodes[i] for i in (0, 2, 1, 3)])
    assert mixed["advantage/std"] == pytest.approx(sorted_by_group["advantage/std"])
    torch.testing.assert_close(moved, same, rtol=1e-3, atol=1e-5)


def test_a_batch_that_is_all_masked_gives_no_loss_and_no_gradient():
    """unsloth-zoo#1286: a mean over no tokens is not a number."""
    generator = np.random.default_rng(0)
    masked = [
        random_sample(generator, length=8, sampled=3).with_fields(weights=np.zeros(3))
        for _ in range(3)
    ]
    learner = Learner(small_llama(), make_config(train=TRAIN))
    sums, _ = learner.forward_backward(masked, learner.config.algo)
    assert sums["loss"] == 0.0
    assert learner.step().grad_norm == 0.0
    learner.close()


def test_a_final_token_that_also_pads_is_scored_and_trained():
    """trl#4974: masking by the padding token's id masked the end of the turn."""
    pad = 0
    generator = np.random.default_rng(1)
    episodes = []
    for length in (5, 9, 14):
        ids = generator.integers(1, 23, length)
        ids[-1] = pad
        mask = np.arange(length) >= length - 3
        sequence = Sequence(
            token_ids=ids,
            response_mask=mask,
            logprobs=np.where(mask, -3.0, np.nan),
            weight_versions=np.where(mask, 0, -1),
            turns=(Turn(length - 3, length, "stop"),),
        )
        episodes.append(Trajectory((sequence,), 1.0, StopReason.DONE, group_id="g"))
    samples = build_samples(episodes, range(3))
    assert [sample.token_ids[sample.positions[-1]] for sample in samples] == [pad] * 3
    model = small_llama()
    learner = Learner(small_llama(), make_config(train=TRAIN))
    for sample, logprobs in zip(samples, learner.logprobs(samples), strict=True):
        own = replace(sample, token_ids=sample.token_ids.copy())
        plain = full_logprobs(model, own).detach().numpy()
        assert len(logprobs) == 3
        np.testing.assert_allclose(logprobs, plain, atol=1e-5)
    learner.close()


@pytest.mark.parametrize(
    ("logprobs", "message"),
    [([-0.5, float("nan"), -0.5], "NaN for a sampled token"), ([-0.5, -0.5], "has length 2")],
)
def test_a_missing_logprob_is_an_error_where_it_is_missing(logprobs, message):
    """vime#70: it was padded with 0, which says that the token was certain."""
    with pytest.raises(ValueError, match=message):
        Generation(np.array([1, 2, 3]), np.array(logprobs), np.zeros(3), "stop")
    with pytest.raises(ValueError, match=r"not a zero|has length"):
        Sequence(
            token_ids=[1, 2, 3],
            response_mask=[True] * 3,
            logprobs=logprobs,
            weight_versions=[0] * 3,
            turns=(Turn(0, 3, "stop"),),
        )
