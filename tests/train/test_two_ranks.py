"""The learner on two ranks, started by torchrun, against one rank and against plain torch."""

from pathlib import Path

import pytest
import torch
from learner_parts import full_logprobs, small_llama
from rank_pair import run_on_two_ranks
from transformers import AutoModelForCausalLM
from two_ranks import build, train_steps, two_rank_config, unequal_samples

from agentrl.train.losses import clipped_policy_loss, kl_penalty


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two-ranks")
    learner, samples = build(), unequal_samples()
    reference = learner.reference_logprobs(samples)
    samples = [s.with_fields(reference_logprobs=r) for s, r in zip(samples, reference, strict=True)]
    train_steps(learner, samples, 3)
    (folder / "one-rank").mkdir()
    learner.save(folder / "one-rank")
    learner.close()
    run_on_two_ranks("two_ranks.py", folder)
    return folder


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> dict:
    return torch.load(folder / "result.pt", weights_only=True)


@pytest.fixture(scope="module")
def samples(two_ranks: dict):
    pairs = zip(unequal_samples(), two_ranks["reference"], strict=True)
    return [sample.with_fields(reference_logprobs=logprobs) for sample, logprobs in pairs]


def test_five_steps_on_two_ranks_equal_those_of_plain_torch(two_ranks: dict, samples):
    algo, model = two_rank_config().algo, small_llama()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, betas=two_rank_config().train.betas, weight_decay=0.0
    )
    for norm in two_ranks["norms"]:
        optimizer.zero_grad()
        for sample in samples:
            logprobs = full_logprobs(model, sample)
            terms, _ = clipped_policy_loss(
                logprobs,
                torch.from_numpy(sample.old_logprobs),
                torch.from_numpy(sample.advantages),
                clip_ratio_low=0.2,
                clip_ratio_high=0.2,
            )
            reference = torch.from_numpy(sample.reference_logprobs)
            terms = terms + algo.kl.coef * kl_penalty(logprobs, reference, "k3")
            (terms * torch.from_numpy(sample.weights)).sum().backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item() == pytest.approx(
            norm, rel=1e-4
        )
        optimizer.step()
    assert two_ranks["weights"].keys() == dict(model.named_parameters()).keys()
    for name, weight in two_ranks["weights"].items():
        torch.testing.assert_close(weight, model.get_parameter(name), atol=2e-5, rtol=0)


def test_five_steps_on_two_ranks_equal_those_on_one(two_ranks: dict, samples):
    learner = build()
    train_steps(learner, samples)
    for name, weight in learner.named_weights():
        torch.testing.assert_close(two_ranks["weights"][name], weight, atol=2e-5, rtol=0)
    learner.close()


def test_scores_of_two_ranks_come_back_in_order(two_ranks: dict):
    model = small_llama()
    for name in ("first", "reference"):
        for logprobs, sample in zip(two_ranks[name], unequal_samples(), strict=True):
            torch.testing.assert_close(logprobs, full_logprobs(model, sample), atol=1e-5, rtol=0)


def test_the_folder_that_two_ranks_save_holds_the_whole_weights(two_ranks: dict, folder: Path):
    loaded = AutoModelForCausalLM.from_pretrained(folder / "model")
    for name, weight in two_ranks["weights"].items():
        assert torch.equal(weight, loaded.get_parameter(name)), name


def test_two_ranks_resume_from_their_own_states_bit_for_bit(two_ranks: dict):
    assert two_ranks["norms"] == two_ranks["norms_again"]
    for name, weight in two_ranks["weights"].items():
        assert torch.equal(weight, two_ranks["weights_again"][name]), name


def test_two_ranks_go_on_from_the_state_of_one(two_ranks: dict):
    assert two_ranks["steps_from_one"] == 5
    for name, weight in two_ranks["weights"].items():
        torch.testing.assert_close(two_ranks["weights_from_one"][name], weight, atol=2e-5, rtol=0)


def test_one_rank_goes_on_from_the_states_of_two(two_ranks: dict, samples, folder: Path):
    learner = build()
    learner.load(folder / "two-ranks")
    train_steps(learner, samples, 2)
    assert learner.optimizer_steps == 5
    for name, weight in learner.named_weights():
        torch.testing.assert_close(two_ranks["weights"][name], weight, atol=2e-5, rtol=0)
    learner.close()


def test_a_rank_that_cannot_write_is_reported_and_the_others_go_on(two_ranks: dict):
    assert "could not write" in two_ranks["save_error"]


def test_gathered_weights_are_not_offered_as_live(two_ranks: dict):
    assert two_ranks["live"] is False
