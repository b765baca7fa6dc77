"""Learner states in host memory and back: the learner goes on bit for bit."""

import numpy as np
import pytest
import torch
from learner_parts import make_config, random_sample, small_llama, weighted

from agentrl.train.learner import Learner
from agentrl.train.offload import HostCopy
from agentrl.train.zero import move_back, move_to_host

MODELS = [{}, {"lora": {"rank": 2}}]


@pytest.fixture
def samples():
    generator = np.random.default_rng(0)
    samples = [random_sample(generator, length=9 + n, sampled=4) for n in range(5)]
    return [s.with_fields(reference_logprobs=s.old_logprobs) for s in weighted(samples)]


def build(model: dict) -> Learner:
    config = make_config(train={"lr": 1e-2}, algo={"kl": {"coef": 0.1}}, model=model)
    return Learner(small_llama(), config, reference=None if model else small_llama())


def step(learner: Learner, samples) -> None:
    learner.forward_backward(samples, learner.config.algo)
    learner.step()


def weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in learner.named_weights()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, weight in one.items():
        assert torch.equal(weight, other[name]), name


def test_views_keep_their_storage_and_their_contents():
    whole = torch.arange(6.0)
    view = whole[2:4]
    copy = HostCopy([whole, view])
    assert copy.nbytes == 24
    assert whole.untyped_storage().nbytes() == 0
    copy.restore()
    assert view.tolist() == [2.0, 3.0]
    view[0] = 9.0
    assert whole.tolist() == [0.0, 1.0, 9.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("model", MODELS)
def test_states_that_were_away_train_to_the_same_bits(samples, model: dict):
    """The host's own memory stands for a GPU's."""
    stayed, moved = build(model), build(model)
    for learner in (stayed, moved):
        step(learner, samples)
    engines = moved._worker.engines
    copy = move_to_host(engines, torch.device("cpu"))
    # Weights in use, float32 weights, two moments and a gradient: of what trains, five times.
    trained = sum(p.ds_numel for p in engines[0].module.parameters() if p.requires_grad)
    assert copy.nbytes >= 4 * 5 * trained
    assert all(p.ds_tensor.untyped_storage().nbytes() == 0 for p in engines[0].module.parameters())
    move_back(engines, copy)
    assert_same(weights(stayed), weights(moved))
    for learner in (stayed, moved):
        step(learner, samples)
    assert_same(weights(stayed), weights(moved))
    for one, other in zip(
        stayed.reference_logprobs(samples), moved.reference_logprobs(samples), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    stayed.close()
    moved.close()


def test_on_a_cpu_there_is_nothing_to_give_and_the_engine_keeps_its_weights(samples):
    learner = build({})
    step(learner, samples)
    live = dict(learner.named_weights())
    learner.offload()
    assert all(weight.numel() > 0 for weight in live.values())
    learner.reload()
    assert all(
        weight.data_ptr() == live[name].data_ptr() for name, weight in learner.named_weights()
    )
    learner.close()


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_a_gpu_gets_its_memory_back_and_the_learner_goes_on_with_the_same_bits(samples, model):
    stayed, moved = build(model), build(model)
    for learner in (stayed, moved):
        step(learner, samples)
    before = torch.cuda.memory_allocated()
    moved.offload()
    trained = sum(p.ds_numel for p in moved._worker.engine.module.parameters() if p.requires_grad)
    assert before - torch.cuda.memory_allocated() >= 4 * 5 * trained
    moved.reload()
    for learner in (stayed, moved):
        step(learner, samples)
    assert_same(weights(stayed), weights(moved))
    stayed.close()
    moved.close()
