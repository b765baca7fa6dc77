"""The trie on a GPU: compiled FlexAttention, forwards and backwards, in trees of several sizes."""

import pytest
import torch
from test_sharing import SMALL, build, gradients
from transformers import LlamaConfig, PreTrainedModel
from trie_parts import forked

from agentrl.train.batch import Sample
from agentrl.train.microbatch import MicroBatch, collate
from agentrl.train.scorer import TokenScorer
from agentrl.train.tree_attention import TREE_ATTENTION

pytestmark = pytest.mark.gpu


def model_with_heads_of_16() -> PreTrainedModel:
    """The smallest that FlexAttention compiles."""
    return build(LlamaConfig(**(SMALL | {"head_dim": 16})))


def on_the_gpu(samples: list[Sample]) -> torch.Tensor:
    """The gradients that `gradients` takes on the CPU."""
    model = model_with_heads_of_16()
    scorer = TokenScorer(model, temperature=0.7, value_head=True).cuda()
    torch.nn.init.ones_(scorer.value_head.weight)
    model.set_attn_implementation(TREE_ATTENTION)
    micro_batch = MicroBatch(tuple(samples), tuple(range(len(samples))), 2, True)
    layout = collate(micro_batch, torch.device("cuda"))
    scores = scorer(
        layout.input_ids_BT, layout.index_N, layout.targets_N, 2, True, tree=layout.tree
    ).expand(layout.expand_R)
    weights_R = torch.linspace(-1, 2, micro_batch.num_sampled, device="cuda")
    loss = (weights_R * (scores.logprobs_N + 0.1 * scores.entropy_N + 0.1 * scores.values_N)).sum()
    parameters = [p for p in scorer.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, parameters, materialize_grads=True)
    return torch.cat([gradient.flatten() for gradient in found]).cpu()


@pytest.mark.parametrize("groups", [1, 8])
def test_gradients_are_those_of_separate_sequences_on_the_cpu(groups: int):
    samples = [sample for seed in range(groups) for sample in forked(seed)]
    expected = gradients(model_with_heads_of_16(), samples, as_trie=False)
    error = (on_the_gpu(samples) - expected).norm() / expected.norm()
    assert error < 1e-3
