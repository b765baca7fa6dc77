"""Which models train on tries, and that those which do get the gradients of separate sequences."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from learner_parts import VOCAB, make_config, small_llama
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
)
from trie_parts import batches, forked, level_llama

from agentrl.errors import UsageError
from agentrl.train.batch import Sample
from agentrl.train.microbatch import MicroBatch, collate
from agentrl.train.scorer import TokenScorer
from agentrl.train.sharing import Sharing, choose_sharing, why_not, why_not_packed
from agentrl.train.tree_attention import TREE_ATTENTION

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
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
FAMILIES = [
    LlamaConfig(**SMALL),  # SmolLM's too
    Qwen2Config(**SMALL),
    Qwen3Config(**SMALL),
    Qwen3MoeConfig(**SMALL, **EXPERTS),
    GemmaConfig(**SMALL),
    MistralConfig(**SMALL, sliding_window=64),
    SmolLM3Config(**SMALL, no_rope_layers=[1, 0]),
]
NARROW = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
PACKED = [
    Gemma2Config(**SMALL, **NARROW),
    Gemma3TextConfig(**SMALL, **NARROW),
    MistralConfig(**SMALL, sliding_window=6),
    LlamaConfig(**SMALL),
]


def build(config: PretrainedConfig) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config)


def gradients(model: PreTrainedModel, samples: list[Sample], form: Sharing) -> torch.Tensor:
    """Of a sum of log-probabilities in which each token of each sample has a weight of its own."""
    scorer = TokenScorer(model, temperature=0.7, value_head=True)
    torch.nn.init.ones_(scorer.value_head.weight)
    own = model.config._attn_implementation
    if form == "trie":
        model.set_attn_implementation(TREE_ATTENTION)
    micro_batch = MicroBatch(tuple(samples), tuple(range(len(samples))), 2, form == "trie")
    if form == "packed":
        micro_batch = in_two_rows(micro_batch)
    layout = collate(micro_batch, torch.device("cpu"))
    scores = scorer(
        layout.input_ids_BT,
        layout.index_N,
        layout.targets_N,
        2,
        True,
        tree=layout.tree,
        positions_BT=layout.positions_BT,
    ).expand(layout.expand_R)
    weights_R = torch.linspace(-1, 2, micro_batch.num_sampled)
    loss = (weights_R * (scores.logprobs_N + 0.1 * scores.entropy_N + 0.1 * scores.values_N)).sum()
    parameters = [p for p in scorer.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, parameters, materialize_grads=True)
    model.set_attn_implementation(own)
    return torch.cat([gradient.flatten() for gradient in found])


def in_two_rows(micro_batch: MicroBatch) -> MicroBatch:
    count = len(micro_batch.samples)
    return replace(micro_batch, row_sizes=(count // 2, count - count // 2))


def relative_error(model: PreTrainedModel, samples: list[Sample], form: Sharing = "trie") -> float:
    expected = gradients(model, samples, "padded")
    return float((gradients(model, samples, form) - expected).norm() / expected.norm())


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config.model_type)
def test_a_family_shares_prefixes_with_the_gradients_of_separate_sequences(config):
    model = build(config)
    assert why_not(model, 64) is None
    assert relative_error(model, forked()) < 1e-6


@pytest.mark.parametrize("config", PACKED, ids=lambda config: config.model_type)
def test_a_family_is_packed_with_the_gradients_of_separate_sequences(config):
    """Windows are shorter than the sequences, which reach over them and not into each other."""
    model = build(config)
    assert why_not_packed(model, 64) is None
    assert relative_error(model, forked(), "packed") < 1e-6


@settings(max_examples=40, deadline=None)
@given(batches())
def test_gradients_are_those_of_separate_sequences_on_random_trees(samples: list[Sample]):
    assert relative_error(level_llama(), samples) < 1e-6


@settings(max_examples=15, deadline=None)
@given(batches())
def test_in_double_precision_but_for_the_head(samples: list[Sample]):
    assert relative_error(level_llama().double(), samples) < 2e-7


def test_bfloat16_gives_them_within_its_rounding():
    assert relative_error(small_llama().bfloat16(), forked()) < 0.1


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Gemma2Config(**SMALL), "gemma2 caps its attention scores"),
        (MistralConfig(**SMALL, sliding_window=63), "a sliding window of 63 tokens"),
        (
            Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=1),
            "a sliding window of 8 tokens",
        ),
        (
            LlamaConfig(
                **SMALL,
                max_position_embeddings=32,
                rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
            ),
            "scales its positions by the length",
        ),
        (
            Qwen3NextConfig(**SMALL, **EXPERTS, shared_expert_intermediate_size=12),
            "has layers of type linear_attention",
        ),
        (
            GptOssConfig(**SMALL, num_local_experts=4, sliding_window=64),
            "cannot attend over a tree (its attention has s_aux)",
        ),
        (LlamaConfig(**SMALL, attention_dropout=0.5), "drops attention weights at random"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_a_model_that_cannot_says_why(config, reason: str):
    found = why_not(build(config), 64)
    assert found is not None
    assert reason in found


def test_windows_that_no_layer_uses_do_not_matter():
    config = Qwen2Config(**SMALL, use_sliding_window=False, sliding_window=8)
    assert why_not(build(config), 64) is None


def test_a_model_whose_tokens_meet_outside_attention_is_found_out():
    """Each token's state is mixed with that of the token before it in the row."""
    model = small_llama()
    layer = model.model.layers[0].mlp
    layer.register_forward_hook(lambda module, args, out: out + out.roll(1, dims=1))
    assert "other states in a tree" in why_not(model, 64)


def test_a_model_that_cannot_share_is_packed_which_the_log_says(caplog):
    model = build(MistralConfig(**SMALL, sliding_window=8))
    with caplog.at_level(logging.INFO, logger="agentrl"):
        assert choose_sharing(model, make_config()) == "packed"
    why, how = (record.getMessage() for record in caplog.records)
    assert "since a model of type mistral has a sliding window of 8" in why
    assert how == "Sequences are packed into rows."
    assert model.config._attn_implementation == "sdpa"


def test_a_model_whose_state_runs_on_gets_rows_of_one_sequence(caplog):
    model = build(Qwen3NextConfig(**SMALL, **EXPERTS, shared_expert_intermediate_size=12))
    with caplog.at_level(logging.INFO, logger="agentrl"):
        assert choose_sharing(model, make_config()) == "padded"
    assert "lets sequences in one row see each other" in caplog.records[-1].getMessage()


def test_who_asks_for_a_form_gets_it():
    model = small_llama()
    for form in ("trie", "packed", "padded"):
        assert choose_sharing(model, make_config(train={"prefix_sharing": form})) == form
    assert choose_sharing(model, make_config()) == "trie"


def test_another_attention_than_sdpa_cannot_share():
    model = build(LlamaConfig(**SMALL, attn_implementation="eager"))
    assert choose_sharing(model, make_config(model={"attn_implementation": "eager"})) == "packed"
    model.config._attn_implementation = "flash_attention_2"
    assert "attn_implementation is flash_attention_2" in why_not_packed(model, 64)


def test_a_form_that_was_asked_for_and_cannot_be_is_an_error():
    config = make_config(train={"prefix_sharing": "trie"}, model={"attn_implementation": "eager"})
    with pytest.raises(UsageError, match=r"model\.attn_implementation is eager: set train\."):
        choose_sharing(small_llama(), config)
    config = make_config(train={"prefix_sharing": "trie"})
    with pytest.raises(UsageError, match="caps its attention scores: set train"):
        choose_sharing(build(Gemma2Config(**SMALL)), config)
    config = make_config(train={"prefix_sharing": "packed"})
    linear = Qwen3NextConfig(**SMALL, **EXPERTS, shared_expert_intermediate_size=12)
    with pytest.raises(UsageError, match=r"is packed, but .* see each other: set train"):
        choose_sharing(build(linear), config)


def test_episodes_that_do_not_fit_a_pass_need_a_model_that_shares():
    config = make_config(train={"max_tokens_per_gpu": 1000})
    assert choose_sharing(small_llama(), config) == "trie"
    windowed = build(MistralConfig(**SMALL, sliding_window=8))
    with pytest.raises(UsageError, match=r"\(2048\) does not fit a pass of .* \(1000\), and"):
        choose_sharing(windowed, config)


def jittery(model: PreTrainedModel, share: float) -> PreTrainedModel:
    """Add to the hidden states what depends on the shape of the input alone, as rounding does."""

    def jitter(
        module: torch.nn.Module, arguments: object, keywords: dict, output: object
    ) -> object:
        generator = torch.Generator().manual_seed(hash(keywords["input_ids"].shape) % 2**31)
        states = output.last_hidden_state
        noise = torch.randn(states.shape, generator=generator)
        output.last_hidden_state = states + share * noise * states.norm() / noise.norm()
        return output

    model.base_model.register_forward_hook(jitter, with_kwargs=True)
    return model


@pytest.mark.parametrize(("share", "trains_on_tries"), [(0.03, True), (0.3, False)])
def test_a_model_that_rounds_a_lot_is_not_taken_for_one_that_sees_too_much(
    share: float, trains_on_tries: bool
):
    """Seen with 7B random weights in bfloat16: separate sequences alone differ by 0.03."""
    assert (why_not(jittery(build(LlamaConfig(**SMALL)), share), 64) is None) == trains_on_tries
