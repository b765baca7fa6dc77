"""Experts chosen by the sampler and replayed by the learner."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from embedded_models import prompt, serving
from learner_parts import VOCAB, make_config, small_llama, weighted
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel, Qwen3MoeConfig
from trie_parts import forked

from agentrl.chat.record import TokenRecord
from agentrl.errors import UsageError
from agentrl.models.routing import Routers
from agentrl.train.batch import Sample, build_samples
from agentrl.train.learner import Learner
from agentrl.train.trie import TokenTrie
from agentrl.types import SamplingParams, StopReason, Trajectory

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
REPLAY = {"rollout": {"router_replay": True}}


def qwen3_moe() -> PreTrainedModel:
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(
            Qwen3MoeConfig(**SMALL, **experts, norm_topk_prob=True)
        ).eval()


def routed(samples: list[Sample], seed: int = 0) -> list[Sample]:
    """Give every input experts at random, the same for what shares a prefix; the last sample, a
    repeat of the first, goes another way from its tenth token on."""
    generator = np.random.default_rng(seed)
    routes: dict[bytes, np.ndarray] = {}

    def draw(prefix: bytes) -> np.ndarray:
        if prefix not in routes:
            pairs = [generator.permutation(6)[:2] for _ in range(2)]
            routes[prefix] = np.array(pairs, dtype=np.int16)
        return routes[prefix]

    given = []
    for sample in samples:
        ids = sample.token_ids.astype(np.int32)
        own = [draw(ids[: n + 1].tobytes()) for n in range(sample.num_inputs)]
        given.append(with_routes(sample, np.stack(own)))
    elsewhere = given[0].routed_experts.copy()
    elsewhere[9:] = (elsewhere[9:] + 1) % 6
    return [*given, with_routes(samples[0], elsewhere)]


def with_routes(sample: Sample, routes: np.ndarray) -> Sample:
    return Sample(
        sample.token_ids,
        sample.positions,
        advantages=sample.advantages,
        routed_experts=routes.astype(np.int16),
    )


def replayed_alone(model: PreTrainedModel, samples: list[Sample]) -> list[torch.Tensor]:
    """Log-probabilities of each sample by itself, with its own experts."""
    routers = Routers(model)
    found = []
    for sample in samples:
        routers.replayed = torch.from_numpy(sample.routed_experts.astype(np.int64))
        ids = torch.tensor(sample.token_ids).long()
        logprobs = model(ids[None, :-1]).logits[0].log_softmax(-1)
        at = torch.tensor(sample.positions).long()
        found.append(logprobs[at - 1, ids[at]])
    return found


@pytest.mark.parametrize("train", [
    {"prefix_sharing": "trie"},
    {"prefix_sharing": "trie", "max_tokens_per_gpu": 12},
    {"prefix_sharing": "packed"},
    {"prefix_sharing": "padded", "gradient_checkpointing": True},
])  # fmt: skip
def test_every_layout_sends_each_token_where_its_own_sample_says(train: dict):
    samples = weighted(routed(forked()))
    limits = {"max_tokens": 64, "max_new_tokens": 64} | REPLAY["rollout"]
    learner = Learner(qwen3_moe(), make_config(train=train, rollout=limits))
    plain = qwen3_moe()
    expected = replayed_alone(plain, samples)
    for found, wanted in zip(learner.logprobs(samples), expected, strict=True):
        np.testing.assert_allclose(found, wanted.detach().numpy(), atol=1e-5)
    weights = [torch.from_numpy(-s.advantages * s.weights) for s in samples]
    loss = sum((w * x).sum() for w, x in zip(weights, expected, strict=True))
    norm = torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*plain.parameters()])]).norm()
    learner.forward_backward(samples, learner.config.algo)
    assert learner.step().grad_norm == pytest.approx(float(norm), rel=1e-5)
    learner.close()


def routes_coarsely(model: PreTrainedModel) -> PreTrainedModel:
    """The model as a sampler whose routers compare experts in eight bits: where two are about
    equally good it takes another than the learner would; their weights are the same."""

    def choose(router, inputs, output):
        logits, _, own = output
        chosen = logits.to(torch.float8_e4m3fn).float().topk(own.shape[-1]).indices
        weights = logits.softmax(-1).gather(-1, chosen)
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    for module in model.modules():
        if type(module).__name__ == "Qwen3MoeTopKRouter":
            module.register_forward_hook(choose)
    return model


async def sampled() -> list[Trajectory]:
    """A group of three episodes of two turns, whose prompt is computed once."""
    episodes = []
    async with serving(routes_coarsely(qwen3_moe()), record_routing=True) as engine:
        for number in range(3):
            record = TokenRecord()
            for turn in range(2):
                record.extend([i % VOCAB for i in prompt(12, seed=turn)])
                params = SamplingParams(10, seed=number)
                record.sample(await engine.generate(record.token_ids, params))
            episodes.append(
                Trajectory((record.sequence(),), float(number), StopReason.DONE, group_id="g")
            )
    return episodes


async def test_replayed_the_learner_says_what_the_sampler_said_and_otherwise_not():
    episodes = await sampled()
    (sequence,) = episodes[0].sequences
    assert sequence.routed_experts.shape == (44, 2, 2)
    assert (sequence.routed_experts[:-1] >= 0).all()
    samples = build_samples(episodes, range(3))
    said = np.concatenate([sample.sampler_logprobs for sample in samples])
    for replay in (True, False):
        learner = Learner(qwen3_moe(), make_config(rollout={"router_replay": replay}))
        apart = np.abs(np.concatenate(learner.logprobs(samples)) - said).max()
        learner.close()
        assert apart < 1e-4 if replay else apart > 1e-2


def test_a_token_that_went_elsewhere_is_another_node():
    samples = routed(forked())
    shared = TokenTrie.build(samples[:-1]).num_nodes
    assert shared == TokenTrie.build(forked()).num_nodes
    assert TokenTrie.build(samples).num_nodes == shared + samples[-1].num_inputs - 9


def test_where_the_experts_are_unknown_the_model_chooses():
    model, ids = qwen3_moe(), torch.tensor([[3, 4, 5, 6]])
    own = model(ids).logits
    routers = Routers(model)
    routers.replayed = torch.full((4, 2, 2), -1)
    torch.testing.assert_close(model(ids).logits, own)
    chosen = routers.taken()
    routers.replayed = (chosen + 1) % 6
    assert (model(ids).logits - own).abs().max() > 0.01
    assert torch.equal(routers.taken(), routers.replayed)


def test_the_weights_of_experts_that_are_not_normalised_are_kept_so():
    model = AutoModelForCausalLM.from_config(MixtralConfig(**SMALL, num_local_experts=4)).eval()
    ids = torch.tensor([[3, 4, 5, 6]])
    own = model(ids).logits
    routers = Routers(model)
    model(ids)
    routers.replayed = routers.taken()
    torch.testing.assert_close(model(ids).logits, own)


def test_a_model_without_experts_is_refused():
    with pytest.raises(UsageError, match="model of type llama has no experts: remove it"):
        Learner(small_llama(), make_config(**REPLAY))
