"""The CPU's kernel and the GPU's mask against plain attention under the tree's boolean mask."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from trie_parts import batches, sample

from agentrl.train import tree_chains, tree_kernel
from agentrl.train.batch import Sample
from agentrl.train.tree_attention import (
    TreePlan,
    causal_attention,
    compiled_size,
    flex_tree_attention,
)
from agentrl.train.tree_chains import LongChain, long_chains, merge_chains
from agentrl.train.tree_kernel import Chain, cut_pieces, tree_attention
from agentrl.train.trie import TokenTrie


def long_and_short() -> list[Sample]:
    """Chains of 200, 70 and 90 nodes, and bushes of short ones at several depths."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 9, 200).tolist()
    arms = [prompt + rng.integers(0, 9, n).tolist() for n in (70, 90, 3, 5, 40)]
    bush = [arms[0] + rng.integers(0, 9, n).tolist() for n in (2, 8, 60, 60, 60, 30)]
    return [sample(tokens) for tokens in [*arms, *bush, [1, 2, 3], [*prompt[:50], 1, 2]]]


def plain(query, key, value, trie: TokenTrie, scale: float) -> torch.Tensor:
    rows = torch.arange(trie.num_nodes)
    seen = (rows[:, None] >= rows) & (rows[:, None] < torch.from_numpy(trie.subtree_end))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scale)


def inputs(trie: TokenTrie, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (1, 3, trie.num_nodes, 8)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for _ in range(4)]


def assert_equal_to_plain(samples: list[Sample], dtype: torch.dtype, tolerance: float) -> None:
    trie = TokenTrie.build(samples)
    *qkv, grad = inputs(trie, dtype)
    pieces = cut_pieces(trie.positions, trie.subtree_end)
    out, expected = tree_attention(*qkv, pieces, 0.35), plain(*qkv, trie, 0.35)
    torch.testing.assert_close(out, expected, atol=tolerance, rtol=0)
    got = torch.autograd.grad(out, qkv, grad.detach())
    for mine, theirs in zip(got, torch.autograd.grad(expected, qkv, grad.detach()), strict=True):
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.1)]
)
def test_results_and_gradients_are_those_of_attention_under_the_mask(dtype, tolerance):
    assert_equal_to_plain(long_and_short(), dtype, tolerance)


@settings(deadline=None)
@given(batches(), st.sampled_from([(1, 1), (3, 5), (8, 30), (64, 128)]))
def test_so_they_are_however_the_tree_is_cut(samples: list[Sample], sizes: tuple[int, int]):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_kernel, "LONG_CHAIN", sizes[0])
        patch.setattr(tree_kernel, "BLOCK_NODES", sizes[1])
        assert_equal_to_plain(samples, torch.float64, 1e-12)


def chunk_of(trie: TokenTrie, start: int, end: int) -> tuple[torch.Tensor, np.ndarray, TokenTrie]:
    """Nodes start .. end as a tree, the ancestors of the first, and how far each reaches."""
    path = np.flatnonzero(trie.subtree_end[:start] > start)
    own = slice(start, end)
    ends = np.minimum(trie.subtree_end, end) - start
    part = TokenTrie(trie.token_ids[own], trie.positions[own], ends[own], path[:0], path[:0])
    return torch.from_numpy(path), ends[path], part


@settings(deadline=None, max_examples=50)
@given(batches(), st.data(), st.sampled_from([(1, 1), (3, 5), (64, 128)]))
def test_a_part_of_a_tree_goes_on_from_its_past(samples, data, sizes: tuple[int, int]):
    trie = TokenTrie.build(samples)
    start = data.draw(st.integers(0, trie.num_nodes - 1))
    end = data.draw(st.integers(start + 1, trie.num_nodes))
    path, rows, part = chunk_of(trie, start, end)
    *qkv, grad = inputs(trie, torch.float64)
    expected = plain(*qkv, trie, 0.35)[:, :, start:end]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_kernel, "LONG_CHAIN", sizes[0])
        patch.setattr(tree_kernel, "BLOCK_NODES", sizes[1])
        pieces = cut_pieces(part.positions, part.subtree_end, rows)
    query, key, value = (x[:, :, start:end] for x in qkv)
    past = (qkv[1][:, :, path], qkv[2][:, :, path])
    out = tree_attention(query, key, value, pieces, 0.35, past)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    grad = grad.detach()[:, :, start:end]
    got = torch.autograd.grad(out, qkv, grad)
    for mine, theirs in zip(got, torch.autograd.grad(expected, qkv, grad), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)


def test_a_chain_is_one_call_and_short_siblings_are_one_block():
    prompt = [0] * 200
    trie = TokenTrie.build([sample([*prompt, k, k, k, 9]) for k in range(1, 9)])
    pieces = cut_pieces(trie.positions, trie.subtree_end)
    assert [(c.start, c.end, c.subtree_end, c.root) for c in pieces.chains] == [(0, 200, 224, True)]
    assert [blocks.nodes_BS.shape for blocks in pieces.blocks] == [(1, 24)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_block_mask_of_a_gpu_gives_the_same():
    trie = TokenTrie.build(long_and_short())
    query, key, value, _ = (x.detach().float() for x in inputs(trie, torch.float32))
    plan = TreePlan(trie.positions, trie.subtree_end, torch.device("cpu"))
    out = flex_tree_attention(query, key[:, :1], value[:, :1], plan, 0.35)
    shared = [x[:, :1].expand(-1, 3, -1, -1) for x in (key, value)]
    torch.testing.assert_close(out, plain(query, *shared, trie, 0.35), atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_block_mask_of_a_gpu_knows_the_past():
    trie = TokenTrie.build(long_and_short())
    path, rows, part = chunk_of(trie, 230, 420)
    query, key, value, _ = (x.detach().float() for x in inputs(trie, torch.float32))
    plan = TreePlan(
        part.positions, part.subtree_end, torch.device("cpu"), SimpleNamespace(rows_P=rows)
    )
    keys, values = (torch.cat([x[:, :, path], x[:, :, 230:420]], dim=2) for x in (key, value))
    out = flex_tree_attention(query[:, :, 230:420], keys, values, plan, 0.35)
    expected = plain(query, key, value, trie, 0.35)[:, :, 230:420]
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)


@pytest.fixture
def chains_of_64(monkeypatch):
    """Chains are long from 64 keys and 128 rows on."""
    for name, value in {"KEYS_STEP": 64, "ROWS_STEP": 128, "LEAST_PAIRS": 64 * 128}.items():
        monkeypatch.setattr(tree_chains, name, value)


def test_long_chains_are_cut_to_few_sizes():
    chains = [Chain(0, 4096, 12_672, True), Chain(4096, 4700, 9000, False)]
    assert long_chains(chains) == (LongChain(0, 4096, 12_288),)  # the other has 2M pairs
    assert long_chains([Chain(3, 3003, 5003, True)]) == (LongChain(3, 3 + 2560, 3 + 4096),)
    # Rows past the last whole step would not see all keys.
    assert long_chains([Chain(0, 4090, 4100, True)]) == (LongChain(0, 3584, 4096),)


@pytest.mark.usefixtures("chains_of_64")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("start", [0, 230])
def test_long_chains_are_merged_with_the_rest_of_the_tree(start: int):
    trie = TokenTrie.build(long_and_short())
    path, rows, part = chunk_of(trie, start, trie.num_nodes)
    query, key, value, _ = (x.detach() for x in inputs(trie, torch.float32))
    past = SimpleNamespace(rows_P=rows) if start else None
    plan = TreePlan(part.positions, part.subtree_end, torch.device("cpu"), past)
    assert len(plan.long_chains) >= (1 if start else 2)
    keys, values = (torch.cat([x[:, :1, path], x[:, :1, start:]], dim=2) for x in (key, value))
    out = flex_tree_attention(query[:, :, start:], keys, values, plan, 0.35, chains_apart=True)
    shared = [x[:, :1].expand(-1, 3, -1, -1) for x in (key, value)]
    expected = plain(query, *shared, trie, 0.35)[:, :, start:]
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("chains_of_64")
def test_gradients_go_through_what_was_merged():
    trie = TokenTrie.build(long_and_short())
    *qkv, grad = inputs(trie, torch.float64)
    shared = [x[:, :1].expand(-1, 3, -1, -1) for x in qkv[1:]]
    chains = long_chains(cut_pieces(trie.positions, trie.subtree_end).chains)
    assert len(chains) >= 2
    rows = torch.arange(trie.num_nodes)
    seen = (rows[:, None] >= rows) & (rows[:, None] < torch.from_numpy(trie.subtree_end))
    for chain in chains:
        seen[chain.start : chain.rows_end, chain.keys] = False
    scores = (qkv[0] @ shared[0].transpose(2, 3) * 0.35).masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    part = scores.softmax(-1).nan_to_num() @ shared[1]  # 0 where a row sees no other key
    out = merge_chains(qkv[0], qkv[1][:, :1], qkv[2][:, :1], part, lse, chains, 0.35)
    expected = plain(qkv[0], *shared, trie, 0.35)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    got = torch.autograd.grad(out, qkv, grad.detach())
    for mine, theirs in zip(got, torch.autograd.grad(expected, qkv, grad.detach()), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=0)


def test_sizes_on_a_gpu_are_whole_blocks():
    assert [compiled_size(n) for n in (1, 128, 129, 1000)] == [128, 128, 256, 1024]


def test_a_single_path_is_causal_attention():
    trie = TokenTrie.build([sample(list(range(3, 60)))])
    query, key, value, _ = (x.detach().float() for x in inputs(trie, torch.float32))
    plan = TreePlan(trie.positions, trie.subtree_end, torch.device("cpu"))
    assert plan.is_path
    out = causal_attention(query, key[:, :1], value[:, :1], 0.35)
    shared = [x[:, :1].expand(-1, 3, -1, -1) for x in (key, value)]
    torch.testing.assert_close(out, plain(query, *shared, trie, 0.35), atol=1e-5, rtol=0)


def test_what_forks_or_continues_other_nodes_is_no_path():
    device = torch.device("cpu")
    forked = TokenTrie.build([sample([1, 2, 3]), sample([1, 4, 3])])
    assert not TreePlan(forked.positions, forked.subtree_end, device).is_path
    alone = TokenTrie.build([sample([1, 2, 3])])
    past = SimpleNamespace(rows_P=np.array([2]))
    assert not TreePlan(alone.positions, alone.subtree_end, device, past).is_path


def test_a_size_recurs_after_so_many_trees_of_it(monkeypatch):
    monkeypatch.setattr("agentrl.train.tree_attention.RECURRING", 2)
    monkeypatch.setattr("agentrl.train.tree_attention._trees_of", Counter())
    trie, device = TokenTrie.build([sample([1, 2, 3])]), torch.device("cpu")
    past = SimpleNamespace(rows_P=np.array([2]))

    def recurs(past: SimpleNamespace | None = None) -> bool:
        return TreePlan(trie.positions, trie.subtree_end, device, past).recurs

    assert [recurs() for _ in range(4)] == [False, False, True, True]
    assert not recurs(past)
