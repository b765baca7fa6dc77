import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from learner_parts import make_config, small_llama, trajectory

from agentrl.config import LossConfig
from agentrl.errors import UsageError
from agentrl.train.batch import Sample, build_samples
from agentrl.train.learner import Learner
from agentrl.train.minibatch import loss_scale_factor, mini_batches
from agentrl.train.preparation import kl_of_samples
from agentrl.train.selection import select_episodes
from agentrl.train.update import policy_update
from agentrl.types import StopReason, Trajectory

TRAIN = {"lr": 1e-2}
GROUPS = ["a"] * 3 + ["b"] * 2 + ["same"] * 2
"""Of the episodes of `batch`."""


def batch():
    """Two groups with a spread, one without."""
    rewards = {"a": (0, 1, 0), "b": (2, 1), "same": (1, 1)}
    return [
        trajectory(reward, group=group, seed=seed, turns=(2, 1 + seed % 3))
        for group, members in rewards.items()
        for seed, reward in enumerate(members)
    ]


def aged(trajectory: Trajectory, version: int) -> Trajectory:
    """The same episode, sampled by the weights of `version`."""
    (sequence,) = trajectory.sequences
    versions = np.where(sequence.response_mask, version, -1)
    return replace(trajectory, sequences=(replace(sequence, weight_versions=versions),))


def weights_after(
    trajectories, updates: int = 1, step: int = 0, **sections
) -> tuple[torch.Tensor, dict]:
    config = make_config(**{"train": TRAIN, **sections})
    learner = Learner(small_llama(), config, reference=small_llama())
    for _ in range(updates):
        metrics = policy_update(learner, trajectories, config, step=step)
    weights = torch.cat([w.flatten().clone() for _, w in learner.named_weights()])
    learner.close()
    return weights, metrics


def test_groups_without_spread_and_unscored_episodes_are_left_out():
    episodes = [
        *batch(),
        trajectory(None, group="a"),
        trajectory(None, group="lost", stop=StopReason.ENV_ERROR),
        trajectory(5.0, group="a", turns=()),
    ]
    selection = select_episodes(episodes, make_config().algo)
    assert selection.trained == (0, 1, 2, 3, 4)
    assert selection.metrics()["group/zero_variance"] == 2
    assert selection.metrics()["group/unscored_share"] == 0.2


def test_an_all_wrong_group_is_dropped_however_its_rewards_were_shaped():
    """The filter is on the task's score (NeMo-RL#2431)."""
    shaped = [trajectory(r, group="wrong", score=0.0) for r in (0.1, 0.2)]
    solved = [trajectory(1.0, group="right", score=s) for s in (0.0, 1.0)]
    assert select_episodes([*shaped, *solved], make_config().algo).trained == (2, 3)


def test_groups_without_spread_stay_when_asked_for():
    algo = make_config(algo={"advantage": {"drop_zero_variance": False}}).algo
    assert len(select_episodes(batch(), algo).trained) == 7


def test_a_batch_without_anything_to_learn_skips_the_step():
    episodes = [trajectory(1.0), trajectory(1.0), trajectory(None)]
    learner = Learner(small_llama(), make_config(train=TRAIN))
    before = torch.cat([w.flatten().clone() for _, w in learner.named_weights()])
    metrics = policy_update(learner, episodes, learner.config)
    after = torch.cat([w.flatten().clone() for _, w in learner.named_weights()])
    learner.close()
    assert metrics["policy/skipped_updates"] == 1
    assert metrics["policy/tokens_trained"] == 0
    assert learner.optimizer_steps == 0
    assert torch.equal(before, after)


def test_no_episode_at_all_skips_the_step():
    learner = Learner(small_llama(), make_config(train=TRAIN))
    assert policy_update(learner, [], learner.config)["policy/skipped_updates"] == 1
    learner.close()


def test_members_without_a_reward_change_nothing():
    """[None, -1, -2, None] trains what [-1, -2] trains (trl#6427)."""
    scored = [trajectory(-1.0, seed=1), trajectory(-2.0, seed=2)]
    unset = [trajectory(None, seed=3), trajectory(None, seed=4)]
    alone, _ = weights_after(scored)
    among, _ = weights_after([unset[0], *scored, unset[1]])
    assert torch.equal(alone, among)


def test_a_cut_episode_counts_in_the_baseline_but_not_in_the_loss():
    """(trl#6439)"""
    cut = trajectory(0.0, seed=2, stop=StopReason.MAX_TOKENS)
    algo = {"loss": {"mask_truncated": True}, "advantage": {"normalize_std": False}}
    _, metrics = weights_after([trajectory(1.0, seed=1), cut], algo=algo)
    assert metrics["policy/tokens_trained"] == 4
    assert metrics["advantage/mean"] == 0.5  # 1 - (1 + 0) / 2
    # the ratio is 1: minus the advantage, averaged over the kept episode's tokens alone
    assert metrics["policy/policy_loss"] == pytest.approx(-0.5)


def test_turns_do_not_change_the_number_of_optimizer_steps():
    """K turns do not mean K optimizer steps (ROLL#409)."""
    for turns in ((1,), (1, 1, 1, 1)):
        config = make_config(
            train=TRAIN | {"ppo_epochs": 2, "mini_batches": 2},
            rollout={"batch_size": 1, "n_samples_per_prompt": 4},
        )
        learner = Learner(small_llama(), config)
        episodes = [trajectory(r, seed=s, turns=turns) for s, r in enumerate((0, 1, 2, 3))]
        assert policy_update(learner, episodes, config)["policy/optimizer_steps"] == 4
        assert learner.optimizer_steps == 4
        learner.close()


def test_an_update_is_repeatable_bit_for_bit():
    train = TRAIN | {"ppo_epochs": 2, "mini_batches": 2}
    one, first = weights_after(batch(), updates=2, train=train)
    two, second = weights_after(batch(), updates=2, train=train)
    assert torch.equal(one, two)
    for rate in ("train/tokens_per_second", "train/tflops"):
        assert first.pop(rate) > 0
        assert second.pop(rate) > 0
    assert first == second


def test_mini_batches_hold_every_episode_once_a_pass_with_all_its_sequences():
    config = make_config(
        train={"mini_batches": 2, "ppo_epochs": 2},
        rollout={"batch_size": 1, "n_samples_per_prompt": 7},
    )
    samples = build_samples(batch(), range(7))
    doubled = [*samples, *samples]  # two sequences of each episode
    steps = list(mini_batches(doubled, config, group_ids=GROUPS, seed=(0, 0)))
    assert len(steps) == 4
    for first, second in (steps[:2], steps[2:]):
        assert {s.episode for s in first} & {s.episode for s in second} == set()
        assert sorted(s.episode for s in (*first, *second)) == sorted([*range(7)] * 2)
    for step in steps:
        assert sum(s.weights.sum() for s in step) == pytest.approx(1.0)
    again = list(mini_batches(doubled, config, group_ids=GROUPS, seed=(0, 1)))
    assert [[s.episode for s in step] for step in steps] != [
        [s.episode for s in step] for step in again
    ]


def test_a_group_stays_in_one_step_as_far_as_steps_of_equal_size_allow():
    """They share their prompt, which a step computes once."""
    config = make_config(
        train={"mini_batches": 2, "ppo_epochs": 8},
        rollout={"batch_size": 4, "n_samples_per_prompt": 2},
    )
    samples = [
        Sample(np.arange(3), np.array([2]), episode=episode) for episode in (0, 2, 4, 6, 1, 3, 5, 7)
    ]
    steps = list(mini_batches(samples, config, group_ids=list("aabbccdd"), seed=(0, 0)))
    pairs = [sorted({"aabbccdd"[s.episode] for s in step}) for step in steps]
    assert all(len(step) == 4 and len(pair) == 2 for step, pair in zip(steps, pairs, strict=True))
    assert len({tuple(pair) for pair in pairs}) > 2  # others together in every pass


def test_or_its_episodes_are_mixed_with_those_of_others():
    config = make_config(
        train={"mini_batches": 2, "shuffle": "episodes"},
        rollout={"batch_size": 8, "n_samples_per_prompt": 8},
    )
    samples = [Sample(np.arange(3), np.array([2]), episode=episode) for episode in range(64)]
    ids = [str(episode // 8) for episode in range(64)]
    for step in mini_batches(samples, config, group_ids=ids, seed=(0, 0)):
        assert len(step) == 32
        assert len({ids[sample.episode] for sample in step}) == 8


def test_a_batch_with_dropped_groups_makes_fewer_steps_of_the_same_size():
    """Adam does not step less for a gradient of few episodes: many such steps undo learning."""
    rollout = {"batch_size": 4, "n_samples_per_prompt": 2}
    config = make_config(train={"mini_batches": 4}, rollout=rollout)

    def sizes(num_episodes: int) -> list[int]:
        samples = build_samples(batch(), range(num_episodes))
        steps = mini_batches(samples, config, group_ids=GROUPS, seed=(0, 0))
        return [len(step) for step in steps]

    assert sizes(7) == [2, 2, 2, 1]
    assert sizes(4) == [2, 2]
    assert sizes(1) == [1]


def test_an_episode_that_forked_counts_as_one_sequence():
    config = make_config(algo={"loss": {"aggregation": "seq-mean-token-sum"}})
    one, two = build_samples(batch(), range(2))
    (step,) = mini_batches([one, one, two], config, group_ids=GROUPS, seed=(0, 0))
    assert [s.weights[0] for s in step] == [0.5, 0.5, 0.5]


def test_greedy_tokens_have_no_weight_and_no_part_in_a_mean():
    one = Sample(np.arange(4), np.array([1, 2, 3]), episode=0).with_fields(temperatures=[1, 0, 1])
    two = Sample(np.arange(4), np.array([2, 3]), episode=1).with_fields(temperatures=[1, 1])
    (step,) = mini_batches([one, two], make_config(), group_ids=GROUPS, seed=(0, 0))
    assert [sample.weights.tolist() for sample in step] == [[0.25, 0, 0.25], [0.25, 0.25]]


def test_tokens_that_are_too_old_have_no_weight_and_no_part_in_a_mean():
    episodes = [aged(episode, versions) for episode, versions in zip(batch(), (3, 5), strict=False)]
    samples = build_samples(episodes, range(2), oldest=4)
    assert [sample.num_trained for sample in samples] == [0, 4]
    (step,) = mini_batches(samples, make_config(), group_ids=GROUPS, seed=(0, 0))
    assert [sample.weights.tolist() for sample in step] == [[0] * 3, [0.25] * 4]


def test_an_update_with_old_tokens_masked_is_that_of_the_others_with_the_whole_groups_baseline():
    ahead = {
        "engine": {"kind": "vllm"},
        "algo": {"correction": {"kind": "tis"}, "loss": {"aggregation": "token-mean"}},
    }
    old, new = batch()[:3], batch()[3:]
    episodes = [aged(episode, 1) for episode in old] + [aged(episode, 3) for episode in new]

    def trained(stale: str) -> tuple[torch.Tensor, dict]:
        train = {**TRAIN, "max_staleness": 1, "stale": stale}
        return weights_after(episodes, step=3, train=train, **ahead)

    masked, metrics = trained("mask")
    assert metrics["policy/tokens_trained"] == sum(e.num_sampled for e in new[:2])
    kept, _ = trained("keep")
    assert not torch.equal(masked, kept)
    only_new, _ = weights_after(new, step=3, train=TRAIN, **ahead)
    torch.testing.assert_close(masked, only_new, rtol=0, atol=1e-6)


def test_better_episodes_become_more_likely():
    episodes = [trajectory(float(seed == 0), seed=seed) for seed in range(4)]
    config = make_config(train=TRAIN)
    learner = Learner(small_llama(), config)
    samples = build_samples(episodes, range(4))
    before = [x.sum() for x in learner.logprobs(samples)]
    policy_update(learner, episodes, config)
    after = [x.sum() for x in learner.logprobs(samples)]
    learner.close()
    assert after[0] - before[0] > max(a - b for a, b in zip(after[1:], before[1:], strict=True))


@pytest.mark.parametrize(("epochs", "old"), [(1, "learner"), (2, "learner"), (2, "sampler")])
def test_the_mismatch_is_between_sampler_and_learner_before_the_update(epochs: int, old: str):
    """The sampler said -3.0 for every token."""
    learner = Learner(small_llama(), make_config())
    samples = build_samples(batch(), range(5))
    distance = np.abs(np.concatenate(learner.logprobs(samples)) + 3.0)
    learner.close()
    _, metrics = weights_after(
        batch(), train=TRAIN | {"ppo_epochs": epochs}, algo={"loss": {"old_logprobs": old}}
    )
    assert metrics["mismatch/log_ratio_mean"] == pytest.approx(distance.mean(), rel=1e-4)
    assert metrics["mismatch/log_ratio_max"] == pytest.approx(distance.max(), rel=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_first_ratio_is_one_at_any_temperature(temperature: float):
    """Unchanged weights (TRL#4159, verl#6240); two epochs, so that the old ones are explicit."""
    _, metrics = weights_after(
        batch(),
        rollout={"temperature": temperature},
        train={"lr": 1e-12, "ppo_epochs": 2},
    )
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-6)


def test_the_samplers_logprobs_are_the_denominator_when_asked_for():
    _, metrics = weights_after(batch(), algo={"loss": {"old_logprobs": "sampler"}})
    assert metrics["policy/ratio_mean"] != pytest.approx(1.0, abs=0.01)


def test_missing_sampler_logprobs_are_an_error_where_they_are_needed_and_none_elsewhere():
    episodes = [trajectory(r, seed=r, logprobs=False) for r in (0, 1)]
    _, metrics = weights_after(episodes)
    assert "mismatch/kl" not in metrics
    with pytest.raises(UsageError, match=r"algo\.loss\.old_logprobs learner"):
        weights_after(episodes, algo={"loss": {"old_logprobs": "sampler"}})


def test_episodes_with_and_without_sampler_logprobs_can_be_trained_together():
    episodes = [trajectory(r, seed=r, logprobs=bool(r)) for r in (0, 1)]
    learner = Learner(small_llama(), make_config())
    (asked_R,) = learner.logprobs(build_samples(episodes, [1]))
    learner.close()
    _, metrics = weights_after(episodes)
    assert metrics["policy/tokens_trained"] == 8
    # the sampler said -3.0 of each token of the second episode, and nothing of the first
    distance = np.abs(asked_R + 3.0)
    assert metrics["mismatch/log_ratio_mean"] == pytest.approx(distance.mean(), rel=1e-4)
    assert metrics["mismatch/log_ratio_max"] == pytest.approx(distance.max(), rel=1e-4)


def test_a_correction_needs_the_samplers_logprobs():
    episodes = [trajectory(r, seed=r, logprobs=False) for r in (0, 1)]
    with pytest.raises(UsageError, match=r"algo\.correction\.kind is tis .* set .* none"):
        weights_after(episodes, algo={"correction": {"kind": "tis"}})


@pytest.mark.parametrize("kind", ["tis", "icepop", "mask", "seq_tis", "seq_mask"])
def test_a_correction_counts_what_it_does_and_changes_the_update(kind: str):
    """The sampler said -3.0 for every token, which is not what the learner says."""
    plain, _ = weights_after(batch())
    corrected, metrics = weights_after(batch(), algo={"correction": {"kind": kind, "high": 1.05}})
    assert not torch.equal(plain, corrected)
    assert 0 <= metrics["mismatch/weight_mean"] <= 1.05
    share = metrics["mismatch/truncated" if "tis" in kind else "mismatch/masked"]
    assert 0 < share <= 1


def test_a_correction_of_a_step_that_masks_everything_moves_nothing():
    bounds = {"kind": "mask", "low": 1.0, "high": 1.0}
    start = torch.cat([w.detach().flatten() for w in small_llama().parameters()])
    after, metrics = weights_after(batch(), algo={"correction": bounds})
    assert metrics["mismatch/masked"] == 1.0
    assert metrics["policy/policy_loss"] == 0.0
    assert torch.equal(start, after)


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus", "turn_level", "gae"])
def test_a_kl_in_the_reward_is_zero_at_first_and_then_changes_the_advantages(estimator: str):
    algo = {"advantage": {"estimator": estimator}}
    rewarded = {"kl": {"coef": 5.0, "estimator": "k1", "in_reward": True}}
    # the first update is the same up to rounding, the second is not
    for updates, same in ((1, True), (2, False)):
        plain, _ = weights_after(batch(), updates=updates, algo=algo)
        punished, metrics = weights_after(batch(), updates=updates, algo=algo | rewarded)
        assert torch.allclose(plain, punished, atol=1e-3) == same
        assert math.isfinite(metrics["policy/kl"])


def test_what_the_kl_takes_from_each_token_worked_out_by_hand():
    (sample,) = build_samples([trajectory(1.0, turns=(2,))], [0])
    sample = sample.with_fields(old_logprobs=[-1.0, -2.0], reference_logprobs=[-1.5, -1.0])
    kl = make_config(algo={"kl": {"coef": 0.5, "estimator": "k1", "in_reward": True}}).algo.kl
    (penalty,) = kl_of_samples([sample], kl)
    np.testing.assert_allclose(penalty, [0.25, -0.5])


def test_each_estimator_and_loss_makes_a_finite_update():
    for name in ("dr_grpo", "rloo", "reinforce_plus_plus_baseline", "turn_level"):
        _, metrics = weights_after(batch(), algo={"advantage": {"estimator": name}})
        assert metrics["group/trained"] == 2
        assert math.isfinite(metrics["policy/grad_norm"])
    for kind in ("gspo", "cispo", "sapo", "reinforce"):
        _, metrics = weights_after(
            batch(), algo={"loss": {"kind": kind}}, train=TRAIN | {"ppo_epochs": 2}
        )
        assert metrics["policy/optimizer_steps"] == 2
        assert metrics["policy/approx_kl"] > 0


def test_an_update_by_sequence_ratios_does_not_depend_on_how_it_was_cut():
    sections = {
        "algo": {"loss": {"kind": "gspo"}, "correction": {"kind": "seq_tis", "high": 5.0}},
        "rollout": {"max_tokens": 30, "max_new_tokens": 30},
    }
    whole, _ = weights_after(batch(), train=TRAIN | {"ppo_epochs": 2}, **sections)
    cut, _ = weights_after(
        batch(), train=TRAIN | {"ppo_epochs": 2, "max_tokens_per_gpu": 30}, **sections
    )
    torch.testing.assert_close(whole, cut, atol=1e-4, rtol=0)


def test_an_overlong_episode_is_trained_on_its_punished_reward():
    """Both were right; the longer one has no token left."""
    episodes = [
        trajectory(1.0, seed=1, turns=(1,), score=1.0),
        trajectory(1.0, seed=2, turns=(4,), score=0.0),
    ]
    rollout = {"max_new_tokens": 4, "overlong_buffer": {"len": 2}}
    algo = {"advantage": {"estimator": "dr_grpo"}, "loss": {"aggregation": "seq-mean-token-mean"}}
    _, metrics = weights_after(episodes, rollout=rollout, algo=algo)
    assert metrics["reward/overlong_penalty_mean"] == pytest.approx(-0.5)
    # advantages 0.5 on one token and -0.5 on four
    assert metrics["advantage/mean"] == pytest.approx(-0.3)


def test_the_constant_length_is_the_most_an_episode_can_sample_unless_it_is_set():
    rollout = make_config(rollout={"max_turns": 3, "max_new_tokens": 5, "max_tokens": 100}).rollout
    aggregation = {"aggregation": "seq-mean-token-sum-norm"}
    assert loss_scale_factor(LossConfig(**aggregation), rollout) == 15
    assert loss_scale_factor(LossConfig(**aggregation, loss_scale_factor=7), rollout) == 7
    config = make_config(algo={"loss": aggregation | {"loss_scale_factor": 7}})
    samples = build_samples(batch(), range(2))
    (step,) = mini_batches(samples, config, group_ids=GROUPS, seed=(0, 0))
    assert [sample.weights[0] for sample in step] == pytest.approx([1 / 14, 1 / 14])


def test_the_kl_to_the_reference_is_zero_at_first_and_grows():
    algo = {"kl": {"coef": 0.01}}
    _, first = weights_after(batch(), algo=algo)
    _, third = weights_after(batch(), algo=algo, updates=3)
    assert first["policy/kl"] == pytest.approx(0.0, abs=1e-6)
    assert third["policy/kl"] > 1e-4


def test_the_value_head_learns_to_explain_the_returns():
    # the last token tells the reward of each episode
    episodes = [trajectory(float(seed % 2), seed=seed, turns=(3,)) for seed in range(6)]
    algo = {"advantage": {"estimator": "gae", "lam": 1.0}, "value": {"clip": 0.0}}
    _, first = weights_after(episodes, algo=algo)
    _, last = weights_after(episodes, algo=algo, updates=20)
    assert first["value/mean"] == 0.0
    assert first["value/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert first["return/mean"] == pytest.approx(0.5)
    assert last["value/explained_variance"] > 0.5
    assert last["policy/value_loss"] < first["policy/value_loss"]


def test_whitened_advantages_have_mean_zero_and_deviation_one():
    _, metrics = weights_after(batch(), algo={"advantage": {"estimator": "gae"}})
    assert metrics["advantage/mean"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["advantage/std"] == pytest.approx(1.0, abs=1e-5)


def test_every_metric_is_finite():
    _, metrics = weights_after(batch(), algo={"kl": {"coef": 0.1}, "entropy_coef": 0.01})
    assert all(math.isfinite(value) for value in metrics.values())
    assert {"policy/policy_loss", "policy/kl", "policy/entropy", "policy/clip_fraction",
            "policy/clip_fraction_low", "policy/clip_fraction_high", "policy/approx_kl",
            "policy/ratio_mean", "policy/grad_norm", "policy/lr"} <= metrics.keys()  # fmt: skip


def test_the_learning_rate_follows_the_run_however_few_steps_a_batch_makes():
    """Of ten training steps, three are behind: a whole batch and one that lost episodes end alike,
    one makes four optimizer steps and the other two."""
    train = {"lr": 1.0, "lr_scheduler": "linear", "max_steps": 10, "mini_batches": 4}
    config = make_config(train=train, rollout={"batch_size": 2, "n_samples_per_prompt": 4})
    whole = [trajectory(float(i % 2), group="ab"[i // 4], seed=i) for i in range(8)]
    for episodes, rates in ((whole, (0.7, 0.675, 0.65, 0.625)), (whole[:4], (0.7, 0.65))):
        learner, scales = Learner(small_llama(), config), []
        original = learner.step

        def step(scale, original=original, scales=scales):
            scales.append(scale)
            return original(scale)

        learner.step = step
        metrics = policy_update(learner, episodes, config, step=3)
        assert scales == pytest.approx(rates)
        assert metrics["policy/lr"] == pytest.approx(sum(rates) / len(rates))
        learner.close()


def test_the_rate_of_the_work_is_logged_and_its_share_of_a_peak_where_that_is_known(monkeypatch):
    _, metrics = weights_after(batch())
    assert "train/mfu" not in metrics  # what a CPU could do is not known
    monkeypatch.setattr(Learner, "peak_flops", property(lambda _: 2e12))
    _, metrics = weights_after(batch())
    assert metrics["train/mfu"] == pytest.approx(metrics["train/tflops"] / 2)
