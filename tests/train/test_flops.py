import numpy as np
import pytest
import torch
from learner_parts import small_llama
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentrl.config import LoraConfig
from agentrl.models.lora import Adapter
from agentrl.train.batch import Sample
from agentrl.train.flops import ModelFlops, Work, peak_flops, work_of
from agentrl.train.microbatch import MicroBatch, collate

# hidden 16, intermediate 24, 2 heads of 8, 1 key-value head, 2 layers, vocabulary 23
LAYER = 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24


@pytest.mark.parametrize("tied", [True, False])
def test_a_dense_model_costs_six_operations_a_weight_and_its_head_only_where_it_is_asked(tied):
    flops = ModelFlops.of(small_llama(tied=tied))
    assert flops.per_token == 6 * 2 * LAYER
    assert flops.per_question == 6 * 16 * 23
    assert flops.per_pair == 12 * 16 * 2
    assert flops.total(Work(tokens=10, questions=3, pairs=55)) == (
        10 * 6 * 2 * LAYER + 3 * 6 * 16 * 23 + 55 * 12 * 16 * 2
    )


def test_frozen_weights_have_no_gradient_of_their_own():
    model = small_llama()
    Adapter(model, LoraConfig(rank=2), seed=0, base="tiny")
    # A factor pair of a layer from a to b has 2 * (a + b) weights.
    factors = 2 * (2 * (16 + 16) + 2 * (16 + 8) + 3 * (16 + 24))
    flops = ModelFlops.of(model)
    assert flops.per_token == 2 * (4 * LAYER + 6 * factors)
    assert flops.per_question == 4 * 16 * 23


def test_a_value_model_costs_a_body_more():
    model = small_llama()
    both = ModelFlops.of(model) + ModelFlops.of(small_llama(), head=False)
    assert both.per_token == 2 * 6 * 2 * LAYER
    assert both.per_question == 6 * 16 * 23
    assert both.per_pair == 2 * 12 * 16 * 2


def test_the_work_of_rows_and_of_a_trie():
    """A prompt of three tokens with two answers of two; the last of each is no input."""
    answers = [Sample(np.array([1, 2, 3, *rest], np.int32), np.array([3, 4], np.int32))
               for rest in ((4, 5), (6, 7))]  # fmt: skip
    device = torch.device("cpu")
    rows = work_of(collate(MicroBatch(tuple(answers), (0, 1), 1), device))
    assert rows == Work(tokens=8, questions=4, pairs=2 * (1 + 2 + 3 + 4))
    trie = work_of(collate(MicroBatch(tuple(answers), (0, 1), 1, as_trie=True), device))
    # Both first answers are asked of the prompt's end, each for its own token.
    assert trie == Work(tokens=5, questions=4, pairs=1 + 2 + 3 + 4 + 4)


def test_of_a_mixture_the_experts_that_a_token_meets_count():
    config = Qwen3MoeConfig(
        vocab_size=23, hidden_size=16, intermediate_size=24, moe_intermediate_size=8,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    attention, router, expert = 2 * 16 * 16 + 2 * 16 * 8, 16 * 8, 3 * 16 * 8
    flops = ModelFlops.of(Qwen3MoeForCausalLM(config))
    assert flops.per_token == 6 * (attention + router + 2 * expert)


def test_the_peak_of_a_card_is_known_by_its_name_in_bfloat16_alone():
    assert peak_flops("NVIDIA H200", "bfloat16") == 989e12
    assert peak_flops("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989e12
    assert peak_flops("NVIDIA A10G", "bfloat16") == 70e12
    assert peak_flops("NVIDIA H200", "float32") is None
    assert peak_flops("Some Card 9000", "bfloat16") is None
