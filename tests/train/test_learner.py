import gc
import json
import os
import weakref
from pathlib import Path
from weakref import WeakSet

import numpy as np
import pytest
import torch
from learner_parts import (
    full_logprobs,
    make_config,
    random_sample,
    small_llama,
    weighted,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from agentrl import heap
from agentrl.errors import TrainingError
from agentrl.models.tiny import build_tiny
from agentrl.train.learner import Learner, build_learner
from agentrl.train.losses import clipped_policy_loss
from agentrl.train.optimizer import lr_scale

TRAIN = {"lr": 1e-2, "max_tokens_per_gpu": 2048}


@pytest.fixture
def samples():
    generator = np.random.default_rng(0)
    lengths = ((9, 3), (30, 12), (5, 1), (17, 8), (24, 2))
    return weighted([random_sample(generator, length=n, sampled=k) for n, k in lengths])


def plain_step(model, optimizer, samples, algo) -> float:
    """The same loss from whole-sequence logits, without micro-batches or DeepSpeed."""
    optimizer.zero_grad()
    for sample in samples:
        terms, _ = clipped_policy_loss(
            full_logprobs(model, sample),
            torch.from_numpy(sample.old_logprobs),
            torch.from_numpy(sample.advantages),
            clip_ratio_low=algo.loss.clip_ratio_low,
            clip_ratio_high=algo.loss.clip_ratio_high,
        )
        (terms * torch.from_numpy(sample.weights)).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return norm.item()


@pytest.mark.parametrize("tied", [True, False])
def test_five_steps_equal_those_of_plain_torch(samples, tied: bool):
    config = make_config(
        train=TRAIN | {"max_tokens_per_gpu": 64, "max_grad_norm": 0.1},
        rollout={"max_tokens": 64, "max_new_tokens": 64},
    )
    learner = Learner(small_llama(tied=tied), config)
    model = small_llama(tied=tied)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, betas=config.train.betas, weight_decay=0.0
    )
    for _ in range(5):
        learner.forward_backward(samples, config.algo)
        outcome = learner.step()
        norm = plain_step(model, optimizer, samples, config.algo)
        assert outcome.grad_norm == pytest.approx(norm, rel=1e-4)
    for name, weight in learner.named_weights():
        torch.testing.assert_close(
            weight, model.get_parameter(name), atol=2e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )
    learner.close()


def test_a_step_does_not_depend_on_how_the_batch_is_cut(samples):
    weights = []
    for cut in ([samples], [samples[:2], samples[2:]], [[sample] for sample in samples]):
        learner = Learner(small_llama(), make_config(train=TRAIN))
        for part in cut:
            learner.forward_backward(part, learner.config.algo)
        learner.step()
        weights.append(torch.cat([w.flatten().clone() for _, w in learner.named_weights()]))
        learner.close()
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0], atol=1e-5, rtol=0)


def test_scores_come_back_in_the_order_of_the_samples(samples):
    learner = Learner(small_llama(), make_config(train=TRAIN))
    model = small_llama()
    for logprobs, sample in zip(learner.logprobs(samples), samples, strict=True):
        expected = full_logprobs(model, sample).detach().numpy()
        np.testing.assert_allclose(logprobs, expected, atol=1e-5)
    _, scores = learner.forward_backward(samples, learner.config.algo)
    for score, sample in zip(scores, samples, strict=True):
        expected = full_logprobs(model, sample).detach().numpy()
        np.testing.assert_allclose(score.logprobs, expected, atol=1e-5)
    learner.close()


def test_the_weights_given_to_an_engine_are_the_learners_own_and_follow_a_step(samples):
    learner = Learner(small_llama(), make_config(train=TRAIN))
    source = learner.weight_source(3)
    assert (source.live, source.version) == (True, 3)
    adopted = small_llama(seed=9)
    for name, weight in source.named_weights():
        adopted.get_parameter(name).data = weight
    before = learner.logprobs(samples)
    learner.forward_backward(samples, learner.config.algo)
    learner.step()
    for name, weight in learner.weight_source(4).named_weights():
        adopted.get_parameter(name).data = weight
    after = learner.logprobs(samples)
    for new, old, sample in zip(after, before, samples, strict=True):
        np.testing.assert_allclose(new, full_logprobs(adopted, sample).detach().numpy(), atol=1e-5)
        assert not np.allclose(new, old, atol=1e-4)
    learner.close()


def test_live_weights_stay_valid_while_the_learner_scores_and_accumulates(samples):
    learner = Learner(small_llama(), make_config(train=TRAIN))
    taken = dict(learner.weight_source(0).named_weights())
    copies = {name: weight.clone() for name, weight in taken.items()}
    learner.logprobs(samples)
    learner.forward_backward(samples, learner.config.algo)
    assert all(torch.equal(taken[name], copy) for name, copy in copies.items())
    learner.close()


def test_weights_can_be_given_away_whole_after_scoring_alone(samples):
    learner = Learner(small_llama(), make_config(train=TRAIN))
    before = {name: weight.clone() for name, weight in learner.named_weights()}
    learner.logprobs(samples)
    after = dict(learner.named_weights())
    assert {name: weight.tolist() for name, weight in after.items()} == {
        name: weight.tolist() for name, weight in before.items()
    }
    learner.close()


def test_an_empty_share_changes_nothing(samples):
    learner = Learner(small_llama(), make_config(train=TRAIN))
    assert learner.logprobs([]) == []
    learner.close()


def test_a_gradient_that_is_not_finite_is_an_error_that_says_what_to_do(samples):
    learner = Learner(small_llama(), make_config(train=TRAIN))
    poisoned = [s.with_fields(advantages=np.full(s.num_sampled, np.inf)) for s in samples]
    learner.forward_backward(poisoned, learner.config.algo)
    with pytest.raises(TrainingError, match=r"not finite.*resume from the last checkpoint"):
        learner.step()
    learner.close()


def test_bfloat16_weights_are_trained_with_a_float32_master(samples):
    """Thirty steps of 1e-4 move weights for which bfloat16 cannot resolve a single one."""
    moved = []
    for model in (small_llama().bfloat16(), small_llama().bfloat16().float()):
        start = model.lm_head.weight.detach().float().clone()
        learner = Learner(model, make_config(train=TRAIN | {"lr": 1e-4}))
        for _ in range(30):
            learner.forward_backward(samples, learner.config.algo)
            learner.step()
        weight = dict(learner.named_weights())["model.embed_tokens.weight"]
        moved.append((weight.float() - start)[start.abs() > 0.25].abs().mean().item())
        learner.close()
    assert weight.dtype == torch.float32
    assert moved[0] == pytest.approx(moved[1], rel=0.2)


def test_gradient_checkpointing_gives_the_same_gradient(samples):
    norms = []
    for checkpointing in (False, True):
        config = make_config(train=TRAIN | {"gradient_checkpointing": checkpointing})
        learner = Learner(small_llama(), config)
        learner.forward_backward(samples, config.algo)
        norms.append(learner.step().grad_norm)
        learner.close()
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_the_reference_policy_stays_what_the_policy_was_before_training(samples):
    config = make_config(algo={"kl": {"coef": 0.1}}, train=TRAIN, rollout={"temperature": 0.7})
    learner = Learner(small_llama(), config, reference=small_llama())
    first = learner.logprobs(samples)
    samples = [
        s.with_fields(reference_logprobs=r)
        for s, r in zip(samples, learner.reference_logprobs(samples), strict=True)
    ]
    for own, sample in zip(first, samples, strict=True):
        np.testing.assert_allclose(own, sample.reference_logprobs, atol=1e-6)
    learner.forward_backward(samples, config.algo)
    learner.step()
    again = learner.reference_logprobs(samples)
    for sample, logprobs in zip(samples, again, strict=True):
        np.testing.assert_array_equal(sample.reference_logprobs, logprobs)
    assert not np.allclose(np.concatenate(learner.logprobs(samples)), np.concatenate(again), 1e-4)
    learner.close()


def test_the_saved_policy_loads_with_its_tokenizer_and_generation_config(tmp_path: Path):
    model, tokenizer = build_tiny(0)
    model.generation_config = GenerationConfig(eos_token_id=3, pad_token_id=0, temperature=0.6,
                                               do_sample=True)  # fmt: skip
    learner = Learner(model, make_config(train=TRAIN), tokenizer=tokenizer)
    learner.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.generation_config.temperature == 0.6
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == tokenizer.chat_template
    for name, weight in learner.named_weights():
        assert torch.equal(weight, loaded.get_parameter(name)), name
    learner.close()


def test_a_saved_policy_with_tied_weights_stays_tied(tmp_path: Path):
    learner = Learner(small_llama(tied=True), make_config(train=TRAIN))
    learner.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True
    learner.close()


def test_a_learner_is_built_from_the_configuration_alone():
    learner = build_learner(make_config(algo={"kl": {"coef": 0.1}}, train=TRAIN))
    assert learner.tokenizer is not None
    assert learner.generation_config.eos_token_id == learner.tokenizer.eos_token_id
    learner.close()
    learner.close()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", [0.0, 0.25, 0.5, 1.0, 1.0, 1.0]),
        ("linear", [0.0, 0.25, 0.5, 1.0, 0.5, 0.0]),
        ("cosine", [0.0, 0.25, 0.5, 1.0, 0.5, 0.0]),
    ],
)
def test_the_learning_rate_warms_up_and_then_follows_its_schedule(name: str, expected):
    config = make_config(train={"lr_scheduler": name, "warmup_steps": 2, "max_steps": 4}).train
    scales = [lr_scale(progress, config) for progress in (0, 0.5, 1, 2, 3, 4)]
    assert scales == pytest.approx(expected)


def test_an_optimizer_step_is_made_with_the_scaled_learning_rate(samples):
    """Adam's first step has the size of its learning rate."""
    learner = Learner(small_llama(), make_config(train=TRAIN | {"lr": 1e-2}))
    before = dict(small_llama().named_parameters())
    learner.forward_backward(samples, learner.config.algo)
    assert learner.step(0.25).lr == pytest.approx(2.5e-3)
    moved = [(w - before[name]).abs().max().item() for name, w in learner.named_weights()]
    assert max(moved) == pytest.approx(2.5e-3, rel=1e-2)
    learner.close()


def test_a_learner_alone_leaves_nothing_from_which_a_child_would_take_itself_for_a_rank():
    Learner(small_llama(), make_config()).close()
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & os.environ.keys()


def test_the_collector_leaves_alone_what_is_there_after_the_first_step(samples, monkeypatch):
    gc.unfreeze()  # learners of other tests were not closed
    monkeypatch.setattr(heap, "_owners", WeakSet())
    learner = Learner(small_llama(), make_config())
    kept = {id(each) for each in gc.get_objects()}
    try:
        learner.forward_backward(samples, learner.config.algo)
        learner.step()
        looked_at = gc.get_objects()
        assert not kept & {id(each) for each in looked_at if each is not kept}
        assert gc.get_freeze_count() > 10 * len(looked_at)
        other = Learner(small_llama(), make_config())
        other.forward_backward(samples, other.config.algo)
        other.step()
        other.close()
        assert gc.get_freeze_count() > 0
    finally:
        learner.close()
        learner.close()
    assert gc.get_freeze_count() == 0


def test_a_run_ahead_of_its_learner_is_frozen_before_an_episode_is_under_way(monkeypatch):
    gc.unfreeze()
    monkeypatch.setattr(heap, "_owners", WeakSet())
    config = make_config(
        train={"max_staleness": 1},
        engine={"kind": "vllm"},
        algo={"correction": {"kind": "tis"}},
    )
    learner = Learner(small_llama(), config)
    assert gc.get_freeze_count() > 0
    learner.close()
    assert gc.get_freeze_count() == 0


def test_a_learner_that_broke_down_is_freed_too(samples, monkeypatch):
    gc.unfreeze()
    monkeypatch.setattr(heap, "_owners", WeakSet())
    learner = Learner(small_llama(), make_config())
    learner.forward_backward(samples, learner.config.algo)
    learner.step()
    weight = weakref.ref(next(learner._worker.scorer.parameters()))

    def out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    learner._worker.score = out_of_memory
    with pytest.raises(torch.OutOfMemoryError):
        learner.score(samples)
    learner.close()
    assert gc.get_freeze_count() == 0
    del learner
    gc.collect()
    assert weight() is None


def test_nothing_of_a_closed_learner_is_kept(samples):
    learner = Learner(small_llama(), make_config())
    learner.forward_backward(samples, learner.config.algo)
    learner.step()
    weight = weakref.ref(next(learner._worker.scorer.parameters()))
    learner.close()
    del learner
    gc.collect()
    assert weight() is None
