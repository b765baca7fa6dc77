"""LoRA under the learner against a plain model with peft, and what leaves it."""

from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from learner_parts import (
    full_logprobs,
    make_config,
    random_sample,
    small_llama,
    weighted,
)
from transformers import AutoModelForCausalLM

from agentrl.engines.embedded.weights import commit, skeleton, stage
from agentrl.errors import UsageError
from agentrl.models.lora import Adapter
from agentrl.train.learner import Learner
from agentrl.train.losses import clipped_policy_loss

LORA = {"rank": 2, "alpha": 3.0}


@pytest.fixture
def samples():
    generator = np.random.default_rng(0)
    lengths = ((9, 3), (30, 12), (5, 1), (17, 8), (24, 2))
    return weighted([random_sample(generator, length=n, sampled=k) for n, k in lengths])


def lora_config(**sections):
    sections.setdefault("train", {"lr": 1e-2})
    return make_config(model={"lora": LORA}, **sections)


def plain_steps(model, config, samples, count: int = 5):
    """The same steps on a plain torch model, of which only what requires a gradient moves."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, betas=config.train.betas, weight_decay=0.0)
    for _ in range(count):
        optimizer.zero_grad()
        for sample in samples:
            terms, _ = clipped_policy_loss(
                full_logprobs(model, sample),
                torch.from_numpy(sample.old_logprobs),
                torch.from_numpy(sample.advantages),
                clip_ratio_low=0.2,
                clip_ratio_high=0.2,
            )
            (terms * torch.from_numpy(sample.weights)).sum().backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()


def train(learner: Learner, samples, count: int = 5) -> None:
    for _ in range(count):
        learner.forward_backward(samples, learner.config.algo)
        learner.step()


@pytest.mark.parametrize("tied", [True, False])
def test_five_steps_equal_those_of_peft_and_plain_torch_and_move_the_factors_only(samples, tied):
    config = lora_config()
    learner = Learner(small_llama(tied=tied), config)
    model = small_llama(tied=tied)
    Adapter(model, config.model.lora, seed=config.train.seed, base="tiny")
    train(learner, samples)
    plain_steps(model, config, samples)
    own = {name.removeprefix("policy."): p for name, p in learner._worker.scorer.named_parameters()}
    untouched = small_llama(tied=tied)
    moved = 0
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(own[name].data, parameter.data, atol=2e-5, rtol=0)
        if "lora_" in name:
            moved += 1
        else:
            assert torch.equal(own[name].data, untouched.get_parameter(
                name.replace(".base_layer", "")))  # fmt: skip
    assert moved == 2 * 7 * 2  # two factors of seven linear layers in each of two layers
    learner.close()


def test_the_merged_weights_are_those_of_a_plain_model_that_scores_the_same(samples):
    learner = Learner(small_llama(), lora_config())
    train(learner, samples)
    source = learner.weight_source(3)
    engine_module = skeleton(small_llama().config)
    commit(engine_module, stage(engine_module, source, torch.device("cpu")))
    merged = {name: weight.clone() for name, weight in source.named_weights()}
    for own, sample in zip(learner.logprobs(samples), samples, strict=True):
        expected = full_logprobs(engine_module, sample).detach().numpy()
        np.testing.assert_allclose(own, expected, atol=1e-5)
    start = small_llama()
    assert not torch.allclose(
        merged["model.layers.1.mlp.up_proj.weight"],
        start.get_parameter("model.layers.1.mlp.up_proj.weight"),
    )
    assert torch.equal(merged["model.norm.weight"], start.model.norm.weight)
    learner.close()


def test_what_an_engine_took_stays_what_it_was_while_the_factors_move_on(samples):
    learner = Learner(small_llama(), lora_config())
    taken = dict(learner.weight_source(0).named_weights())
    copies = {name: weight.clone() for name, weight in taken.items()}
    train(learner, samples, 1)
    assert all(torch.equal(taken[name], copy) for name, copy in copies.items())
    learner.close()


def test_the_reference_is_the_policy_without_its_factors(samples):
    learner = Learner(small_llama(), lora_config(algo={"kl": {"coef": 0.1}}))
    start = small_llama()
    expected = [full_logprobs(start, sample).detach().numpy() for sample in samples]
    train(learner, [s.with_fields(reference_logprobs=e) for s, e in zip(samples, expected,
                                                                       strict=True)])  # fmt: skip
    for reference, own, base in zip(
        learner.reference_logprobs(samples), learner.logprobs(samples), expected, strict=True
    ):
        np.testing.assert_allclose(reference, base, atol=1e-5)
        assert not np.allclose(own, base, atol=1e-3)
    learner.close()


def test_the_folders_load_in_transformers_and_in_peft_and_compute_the_same(samples, tmp_path: Path):
    learner = Learner(small_llama(), lora_config())
    train(learner, samples)
    learner.save_pretrained(tmp_path / "model")
    learner.save_adapter(tmp_path / "adapter")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with_adapter = peft.PeftModel.from_pretrained(small_llama(), tmp_path / "adapter")
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    for own, sample in zip(learner.logprobs(samples), samples, strict=True):
        for model in (whole, with_adapter):
            expected = full_logprobs(model, sample).detach().numpy()
            np.testing.assert_allclose(own, expected, atol=1e-5)
    learner.close()


def test_a_run_goes_on_bit_for_bit_from_the_factors_alone(samples, tmp_path: Path):
    learner = Learner(small_llama(), lora_config())
    train(learner, samples, 2)
    learner.save(tmp_path)
    train(learner, samples, 2)
    resumed = Learner(small_llama(), lora_config())
    resumed.load(tmp_path)
    train(resumed, samples, 2)
    for (name, one), (_, other) in zip(
        learner.named_weights(), resumed.named_weights(), strict=True
    ):
        assert torch.equal(one, other), name
    (file,) = tmp_path.iterdir()
    saved = torch.load(file, weights_only=True)["parts"]["weights"]
    assert len(saved) == 28
    assert all(".lora_" in name for name in saved)
    learner.close()
    resumed.close()


@pytest.mark.parametrize("modules", [("lm_head",), ("embed_tokens",), ("no_such_layer",)])
def test_layers_that_cannot_have_factors_are_refused_by_name(modules):
    config = make_config(model={"lora": LORA | {"target_modules": modules}})
    with pytest.raises(UsageError, match=rf"target_modules {modules[0]}.*q_proj"):
        Learner(small_llama(), config)


def test_a_name_that_fits_no_layer_is_refused_beside_one_that_does():
    config = make_config(model={"lora": LORA | {"target_modules": ("q_proj", "qproj")}})
    with pytest.raises(UsageError, match=r"target_modules qproj fits no layer"):
        Learner(small_llama(), config)


def test_a_list_of_layers_gives_factors_to_these_alone():
    config = make_config(model={"lora": LORA | {"target_modules": ("q_proj", "v_proj")}})
    learner = Learner(small_llama(), config)
    trained = {
        name.rpartition(".lora_")[0].rpartition(".")[2]
        for name, parameter in learner._worker.scorer.named_parameters()
        if parameter.requires_grad
    }
    assert trained == {"q_proj", "v_proj"}
    learner.close()


def test_settings_of_a_lora_that_is_not_there_are_refused():
    with pytest.raises(ValueError, match=r"model\.lora\.alpha would be ignored"):
        make_config(model={"lora": {"alpha": 16.0}})
