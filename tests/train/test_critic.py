"""A value model of its own: against plain torch, over a checkpoint, and beside the policy."""

from pathlib import Path

import numpy as np
import pytest
import torch
from learner_parts import make_config, random_sample, small_llama, weighted

from agentrl.train.critic import ValueScorer
from agentrl.train.learner import Learner
from agentrl.train.losses import value_loss


@pytest.fixture
def samples():
    generator = np.random.default_rng(0)
    lengths = ((9, 3), (30, 12), (5, 1), (17, 8), (24, 2))
    return weighted(
        [
            random_sample(generator, length=n, sampled=k).with_fields(
                returns=generator.normal(size=k), old_values=0.1 * generator.normal(size=k)
            )
            for n, k in lengths
        ]
    )


def config(**sections):
    value = {"model": "separate", "lr": 3e-3, "coef": 2.0}
    algo = {"advantage": {"estimator": "gae"}, "value": value}
    return make_config(algo=algo, train={"lr": 1e-2}, **sections)


def build() -> Learner:
    return Learner(small_llama(), config(), value_model=small_llama(seed=1))


def train(learner: Learner, samples, count: int) -> list[float]:
    norms = []
    for _ in range(count):
        learner.forward_backward(samples, learner.config.algo)
        outcome = learner.step()
        assert outcome.value_grad_norm is not None
        norms.append(outcome.value_grad_norm)
    return norms


def plain_values(model: ValueScorer, sample) -> torch.Tensor:
    ids = torch.from_numpy(sample.token_ids[:-1]).long().unsqueeze(0)
    index = torch.from_numpy(sample.positions).long() - 1
    return model(ids, index, index).values_N


def test_five_steps_equal_those_of_plain_torch_at_its_own_learning_rate(samples):
    learner, model = build(), ValueScorer(small_llama(seed=1))
    norms = train(learner, samples, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    for norm in norms:
        optimizer.zero_grad()
        for sample in samples:
            terms = value_loss(
                plain_values(model, sample),
                torch.from_numpy(sample.old_values),
                torch.from_numpy(sample.returns),
                clip=0.2,
            )
            (2.0 * terms * torch.from_numpy(sample.weights)).sum().backward()
        plain_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        assert plain_norm == pytest.approx(norm, rel=1e-4)
        optimizer.step()
    for values, sample in zip(learner.values(samples), samples, strict=True):
        expected = plain_values(model, sample).detach().numpy()
        np.testing.assert_allclose(values, expected, atol=2e-5)
    learner.close()


def test_the_policy_learns_as_if_there_were_no_values(samples):
    """A shared head would bend the trunk; a value model does not touch it."""
    alone = Learner(small_llama(), make_config(train={"lr": 1e-2}))
    beside = build()
    train(beside, samples, 3)
    for _ in range(3):
        alone.forward_backward(samples, alone.config.algo)
        alone.step()
    for (name, one), (_, other) in zip(alone.named_weights(), beside.named_weights(), strict=True):
        assert torch.equal(one, other), name
    alone.close()
    beside.close()


def test_a_resumed_value_model_goes_on_bit_for_bit(samples, tmp_path: Path):
    whole, resumed = build(), build()
    train(whole, samples, 2)
    whole.save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "learner-rank-00000.pt",
        "value-rank-00000.pt",
    ]
    resumed.load(tmp_path)
    assert train(whole, samples, 2) == train(resumed, samples, 2)
    for one, other in zip(whole.values(samples), resumed.values(samples), strict=True):
        np.testing.assert_array_equal(one, other)
    whole.close()
    resumed.close()


def test_a_learning_rate_of_a_shared_head_is_refused():
    with pytest.raises(ValueError, match=r"algo\.value\.lr would be ignored.*shared"):
        make_config(algo={"advantage": {"estimator": "gae"}, "value": {"lr": 1e-3}})
