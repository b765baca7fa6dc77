import numpy as np
import pytest
import torch
from learner_parts import full_logprobs, random_sample, small_llama
from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM

from agentrl.errors import UsageError
from agentrl.train.batch import Sample
from agentrl.train.microbatch import MicroBatch, collate
from agentrl.train.scorer import TokenScorer, policy_names

SMALL = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def samples(seed: int = 0) -> list[Sample]:
    generator = np.random.default_rng(seed)
    return [random_sample(generator, length=n, sampled=k) for n, k in ((9, 3), (17, 8), (5, 1))]


def run(scorer: TokenScorer, batch: list[Sample], *, chunks: int = 1, entropy_grad: bool = False):
    layout = collate(MicroBatch(tuple(batch), (0, 1, 2), chunks), torch.device("cpu"))
    return scorer(layout.input_ids_BT, layout.index_N, layout.targets_N, chunks, entropy_grad)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_the_tempered_distribution_whatever_the_padding(temperature: float):
    """Raw and tempered log-probabilities are not mixed (TRL#4159, verl#6240)."""
    model, batch = small_llama(), samples()
    scores = run(TokenScorer(model, temperature=temperature), batch)
    expected = torch.cat([full_logprobs(model, sample, temperature) for sample in batch])
    torch.testing.assert_close(scores.logprobs_N, expected, atol=1e-5, rtol=0)


def test_each_token_has_the_temperature_that_is_given_for_it():
    model = small_llama()
    hot = [s.with_fields(temperatures=np.full(s.num_sampled, 0.5)) for s in samples()]
    hot[1] = hot[1].with_fields(temperatures=[1, 2, 1, 2, 0.5, 1, 1, 1])
    layout = collate(MicroBatch(tuple(hot), (0, 1, 2), 1), torch.device("cpu"))
    scores = TokenScorer(model, temperature=1.0)(
        layout.input_ids_BT, layout.index_N, layout.targets_N, 2,
        temperatures_N=layout.temperatures_N,
    )  # fmt: skip
    at = {t: torch.cat([full_logprobs(model, s, t) for s in hot]) for t in (0.5, 1.0, 2.0)}
    given = torch.from_numpy(np.concatenate([s.temperatures for s in hot]))
    expected = torch.where(given == 0.5, at[0.5], torch.where(given == 1, at[1.0], at[2.0]))
    torch.testing.assert_close(scores.logprobs_N, expected, atol=1e-5, rtol=0)


def test_a_token_in_the_middle_that_is_not_sampled_has_no_part():
    """The scores equal those of the whole sequence under its mask (trl#4975)."""
    model = small_llama()
    sample = Sample(np.array([3, 4, 5, 6, 7]), np.array([1, 2, 4]))
    scores = run(TokenScorer(model, temperature=1.0), [sample])
    every = Sample(sample.token_ids, np.array([1, 2, 3, 4]))
    whole = full_logprobs(model, every)[torch.tensor([True, True, False, True])]
    torch.testing.assert_close(scores.logprobs_N, whole)
    (gradient,) = torch.autograd.grad(scores.logprobs_N.sum(), model.lm_head.weight)
    (expected,) = torch.autograd.grad(whole.sum(), model.lm_head.weight)
    torch.testing.assert_close(gradient, expected)


def test_the_entropy_is_that_of_the_distribution_each_token_was_sampled_from():
    model = small_llama()
    scores = run(TokenScorer(model, temperature=1.0), samples()[:1])
    sample = samples()[0]
    logits = model(torch.from_numpy(sample.token_ids).long()[None]).logits[0, sample.positions - 1]
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(scores.entropy_N, expected)


def test_the_entropy_has_a_gradient_only_where_it_is_asked_for():
    model, sample = small_llama(), samples()[0]
    logits = model(torch.from_numpy(sample.token_ids).long()[None]).logits[0, sample.positions - 1]
    entropy = torch.distributions.Categorical(logits=logits).entropy().sum()
    (expected,) = torch.autograd.grad(entropy, model.lm_head.weight)
    scorer = TokenScorer(model, temperature=1.0)
    scores = run(scorer, [sample], entropy_grad=True)
    (gradient,) = torch.autograd.grad(scores.entropy_N.sum(), model.lm_head.weight)
    torch.testing.assert_close(gradient, expected)
    assert not run(scorer, [sample]).entropy_N.requires_grad


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_chunks_of_the_head_change_neither_scores_nor_gradients(entropy_grad: bool):
    gradients, logprobs = [], []
    for chunks in (1, 3, 20):  # 20 chunks of 12 tokens: some are empty
        model = small_llama()
        scores = run(TokenScorer(model, temperature=1.0), samples(), chunks=chunks,
                     entropy_grad=entropy_grad)  # fmt: skip
        (scores.logprobs_N.sum() + scores.entropy_N.sum()).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        logprobs.append(scores.logprobs_N)
    for other in (1, 2):
        torch.testing.assert_close(logprobs[other], logprobs[0])
        torch.testing.assert_close(gradients[other], gradients[0], atol=1e-5, rtol=1e-4)


def test_an_empty_batch_gives_every_parameter_a_gradient_of_zero():
    scorer = TokenScorer(small_llama(), temperature=1.0, value_head=True)
    layout = collate(MicroBatch((), (), 1), torch.device("cpu"))
    scores = scorer(layout.input_ids_BT, layout.index_N, layout.targets_N)
    (scores.logprobs_N.sum() + scores.values_N.sum()).backward()
    assert all(p.grad is not None and not p.grad.any() for p in scorer.parameters())


def test_a_new_value_head_predicts_zero_and_learns_from_the_shared_trunk():
    scorer = TokenScorer(small_llama(), temperature=1.0, value_head=True)
    scores = run(scorer, samples())
    assert not scores.values_N.any()
    (scores.values_N - 1).square().sum().backward()
    assert scorer.value_head.weight.grad.any()


def test_logits_with_a_soft_cap_are_capped():
    model = Gemma2ForCausalLM(
        Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=0.5, initializer_range=0.5)
    ).eval()
    batch = samples()
    scores = run(TokenScorer(model, temperature=1.0), batch)
    expected = torch.cat([full_logprobs(model, sample) for sample in batch])
    torch.testing.assert_close(scores.logprobs_N, expected, atol=1e-5, rtol=1e-4)


def test_a_model_that_scales_its_logits_otherwise_is_refused():
    model = GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=4.0, initializer_range=0.5))
    with pytest.raises(UsageError, match="GraniteForCausalLM scales its logits"):
        TokenScorer(model, temperature=1.0)


def test_names_are_those_of_the_hugging_face_model_and_tied_weights_come_once():
    tied, untied = small_llama(tied=True), small_llama(tied=False)
    names = [name for name, _ in policy_names(TokenScorer(tied, temperature=1.0, value_head=True))]
    assert names == [name for name, _ in tied.named_parameters()]
    assert "lm_head.weight" not in names
    assert "lm_head.weight" in dict(policy_names(TokenScorer(untied, temperature=1.0)))
