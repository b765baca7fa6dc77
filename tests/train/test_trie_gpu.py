"""The trie on a GPU: compiled FlexAttention, forwards and backwards, in trees of several sizes."""

import pytest
import torch
from learner_parts import VOCAB
from test_sharing import SMALL, build, gradients
from transformers import (
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3
from trie_parts import forked, sample

from agentrl.models.liger import use_liger_kernels
from agentrl.train import tree_attention, tree_chains
from agentrl.train.batch import Sample
from agentrl.train.microbatch import MicroBatch, collate
from agentrl.train.scorer import TokenScorer
from agentrl.train.tree_attention import TREE_ATTENTION

pytestmark = pytest.mark.gpu

HEADS_OF_16 = SMALL | {"head_dim": 16}
"""The smallest that FlexAttention compiles."""


def on_the_gpu(model: PreTrainedModel, samples: list[Sample]) -> torch.Tensor:
    """The gradients that `gradients` takes on the CPU."""
    scorer = TokenScorer(model.cuda(), temperature=0.7, value_head=True).cuda()
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


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def llama() -> PreTrainedModel:
    return build(LlamaConfig(**HEADS_OF_16))


@pytest.mark.parametrize("recurring", [0, 1000])
@pytest.mark.parametrize("groups", [1, 8, 5, 13])
def test_gradients_are_those_of_separate_sequences_on_the_cpu(
    groups: int, recurring: int, monkeypatch: pytest.MonkeyPatch
):
    """With a kernel for every size, and with one for each."""
    monkeypatch.setattr(tree_attention, "RECURRING", recurring)
    samples = [sample for seed in range(groups) for sample in forked(seed)]
    expected = gradients(llama(), samples, "padded")
    assert relative_error(on_the_gpu(llama(), samples), expected) < 1e-3


def test_long_chains_run_through_cudnn_and_are_no_less_exact(monkeypatch: pytest.MonkeyPatch):
    def model() -> PreTrainedModel:
        return build(LlamaConfig(**SMALL | {"head_dim": 64, "num_attention_heads": 4}))

    rng = torch.Generator().manual_seed(0)
    prompt, *ends = (torch.randint(VOCAB, (n,), generator=rng).tolist() for n in (300, 90, 70, 200))
    samples = [sample([*prompt, *end], sampled=40) for end in ends]
    for name, value in {"KEYS_STEP": 128, "ROWS_STEP": 128, "LEAST_PAIRS": 128 * 128}.items():
        monkeypatch.setattr(tree_chains, name, value)
    merged: list[int] = []
    merge = tree_attention.merge_chains

    def counted(*arguments: object) -> torch.Tensor:
        merged.append(len(arguments[5]))  # type: ignore[arg-type]
        return merge(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(tree_attention, "merge_chains", counted)
    expected = gradients(model(), samples, "padded")
    error = relative_error(on_the_gpu(model().bfloat16(), samples), expected)
    assert merged == [2] * SMALL["num_hidden_layers"]  # the prompt and its longest end
    monkeypatch.setattr(tree_attention, "takes_chains", lambda _: False)
    without = relative_error(on_the_gpu(model().bfloat16(), samples), expected)
    assert len(merged) == SMALL["num_hidden_layers"]
    assert error < 1.2 * without < 0.1


def test_a_single_path_too():
    generator = torch.Generator().manual_seed(0)
    path = sample(torch.randint(VOCAB, (200,), generator=generator).tolist(), sampled=60)
    expected = gradients(llama(), [path], "padded")
    assert relative_error(on_the_gpu(llama(), [path]), expected) < 1e-3


@pytest.mark.parametrize(
    ("config", "module"),
    [
        (LlamaConfig(**HEADS_OF_16), modeling_llama),
        (Qwen2Config(**HEADS_OF_16), modeling_qwen2),
        (Qwen3Config(**HEADS_OF_16), modeling_qwen3),
    ],
    ids=["llama", "qwen2", "qwen3"],
)
def test_liger_kernels_give_the_same_gradients(
    config: PretrainedConfig, module: object, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("liger_kernel")
    samples = [sample for seed in range(3) for sample in forked(seed)]
    expected = gradients(build(config), samples, "padded")
    for name in vars(module).copy():  # undone afterwards: they are replaced for the whole process
        if name == "apply_rotary_pos_emb" or name.endswith(("RMSNorm", "MLP")):
            monkeypatch.setattr(module, name, getattr(module, name))
    model = build(config)
    use_liger_kernels(model)
    assert relative_error(on_the_gpu(model, samples), expected) < 1e-3
