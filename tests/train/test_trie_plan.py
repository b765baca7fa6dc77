import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trie_parts import batches, sample

from agentrl.train import microbatch
from agentrl.train.batch import Sample
from agentrl.train.microbatch import MicroBatch
from agentrl.train.trie import TokenTrie
from agentrl.train.trie_plan import plan_tries


def plan(samples: list[Sample], world_size: int = 1, max_tokens: int = 64, token_cost: int = 100):
    return plan_tries(
        samples,
        world_size=world_size,
        max_tokens=max_tokens,
        vocab_size=10,
        token_cost=token_cost,
    )


def nodes(micro_batch: MicroBatch) -> int:
    return TokenTrie.build(micro_batch.samples).num_nodes


def group(prompt: int, *responses: int, token: int = 1) -> list[Sample]:
    """Members that share `prompt` inputs and then have inputs of their own."""
    return [
        sample([token] * prompt + [10 * token + i] * n + [0]) for i, n in enumerate(responses, 1)
    ]


@settings(deadline=None)
@given(batches(), st.integers(1, 4), st.sampled_from([80, 120, 1000]))
def test_every_sample_is_in_one_trie_within_the_limit_and_ranks_have_equally_many(
    samples: list[Sample], world_size: int, max_tokens: int
):
    ranks = plan(samples, world_size, max(max_tokens, max(s.num_inputs for s in samples)))
    assert len(ranks) == world_size
    assert len({len(share) for share in ranks}) == 1
    micro_batches = [mb for share in ranks for mb in share]
    assert sorted(i for mb in micro_batches for i in mb.indices) == list(range(len(samples)))
    for micro_batch in micro_batches:
        assert [samples[i] for i in micro_batch.indices] == list(micro_batch.samples)
        limit = max(max_tokens, max(s.num_inputs for s in samples))
        assert nodes(micro_batch) <= limit


def test_what_fits_is_one_trie():
    (share,) = plan(group(40, 10, 10))
    assert [nodes(mb) for mb in share] == [60]


def test_a_cut_goes_where_the_least_prefix_is_repeated():
    """Groups of 30 + 2 * 10 and 30 + 3 * 5 tokens: the cut between them repeats nothing, though
    one more sample would have fitted before it."""
    samples = group(30, 5, 5, 5, token=2) + group(30, 10, 10, token=1)
    (share,) = plan(samples, max_tokens=90)
    assert [sorted(mb.indices) for mb in share] == [[3, 4], [0, 1, 2]]
    assert [nodes(mb) for mb in share] == [50, 45]


def test_a_wide_trie_is_cut_and_its_prefix_repeated():
    (share,) = plan(group(40, 10, 10, 10, 10), max_tokens=64)
    assert sorted(nodes(mb) for mb in share) == [60, 60]


def test_ranks_share_the_work_of_one_group():
    ranks = plan(group(40, *[10] * 8), world_size=2, max_tokens=1000)
    assert [[nodes(mb) for mb in share] for share in ranks] == [[80], [80]]


def test_a_long_sequence_weighs_more_than_its_tokens():
    """Without work beyond attention, one of 40 inputs (820 pairs) equals four of 20 (210 each)."""
    samples = [sample([i] * n + [0]) for i, n in enumerate([40, 20, 20, 20, 20])]
    ranks = plan(samples, world_size=2, max_tokens=1000, token_cost=0)
    assert sorted(sorted(mb.indices) for share in ranks for mb in share) == [[0], [1, 2, 3, 4]]


def test_a_rank_without_work_gets_an_empty_micro_batch():
    ranks = plan([sample([1, 2, 3])], world_size=2)
    assert [[mb.indices for mb in share] for share in ranks] == [[(0,)], [()]]
    assert all(mb.as_trie for share in ranks for mb in share)


def test_no_samples_are_no_micro_batches():
    assert plan([], world_size=2) == [[], []]


def test_every_rank_cuts_the_head_into_as_many_chunks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(microbatch, "LOGITS_PER_CHUNK", 10)
    ranks = plan([sample(list(range(9)), 8), sample([9] * 9)], world_size=2)
    assert [[mb.head_chunks for mb in share] for share in ranks] == [[8], [8]]


def test_the_order_of_equal_samples_is_theirs_and_a_plan_repeats_itself():
    samples = group(5, 3, 3) * 2
    first, second = plan(samples), plan(samples)
    assert [mb.indices for mb in first[0]] == [mb.indices for mb in second[0]] == [(0, 2, 1, 3)]


def test_a_sequence_longer_than_the_limit_takes_several_passes_on_every_rank():
    """Of 150 nodes at most 64 at a time; the ranks of a round make as many passes."""
    ranks = plan([sample(np.arange(151).tolist()), sample([7, 8, 9])], world_size=2)
    assert [[(nodes(mb), mb.chunks) for mb in share] for share in ranks] == [[(150, 3)], [(2, 3)]]


def test_long_siblings_stay_together_where_apart_they_would_repeat_more_than_a_pass():
    (share,) = plan(group(70, 10, 10, 10) + group(50, 30, 30, token=2), max_tokens=64)
    assert [(nodes(mb), mb.chunks) for mb in share] == [(100, 2), (80, 2), (80, 2)]


@settings(deadline=None)
@given(batches(), st.integers(1, 3), st.integers(1, 30))
def test_no_pass_is_larger_than_the_limit_however_long_the_sequences(
    samples: list[Sample], world_size: int, max_tokens: int
):
    ranks = plan(samples, world_size, max_tokens)
    assert sorted(i for share in ranks for mb in share for i in mb.indices) == [
        *range(len(samples))
    ]
    for same_round in zip(*ranks, strict=True):
        assert len({mb.chunks for mb in same_round}) == 1
        assert all(nodes(mb) <= mb.chunks * max_tokens for mb in same_round)
