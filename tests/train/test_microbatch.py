import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import UsageError
from agentrl.train import microbatch
from agentrl.train.batch import Sample
from agentrl.train.microbatch import MicroBatch, collate, token_field
from agentrl.train.row_plan import plan_rows

CPU = torch.device("cpu")


def sample(inputs: int) -> Sample:
    return Sample(np.arange(inputs + 1, dtype=np.int32), np.array([inputs], dtype=np.int32))


def plan(lengths: list[int], world_size: int = 1, max_tokens: int = 32):
    return plan_rows(
        [sample(n) for n in lengths], world_size=world_size, max_tokens=max_tokens, vocab_size=10
    )


@given(st.lists(st.integers(1, 32), max_size=40), st.integers(1, 5), st.sampled_from([32, 50, 200]))
def test_every_sample_is_planned_once_within_the_budget_and_equally_often_on_every_rank(
    lengths: list[int], world_size: int, max_tokens: int
):
    ranks = plan(lengths, world_size, max_tokens)
    assert len({len(share) for share in ranks}) == 1
    assert sorted(i for share in ranks for mb in share for i in mb.indices) == [
        *range(len(lengths))
    ]
    for micro_batch in (mb for share in ranks for mb in share):
        inputs = [s.num_inputs for s in micro_batch.samples]
        assert len(inputs) * max(inputs, default=0) <= max_tokens


def test_ranks_get_about_the_same_number_of_tokens():
    ranks = plan([30, 10, 10, 10, 20, 20], world_size=2, max_tokens=1000)
    assert [sum(s.num_inputs for mb in share for s in mb.samples) for share in ranks] == [50, 50]


def test_samples_of_a_length_go_together():
    (share,) = plan([2, 16, 2, 16, 2, 2], max_tokens=32)
    assert [mb.indices for mb in share] == [(1, 3), (0, 2, 4, 5)]


def test_packed_rows_hold_several_samples_and_none_is_longer_than_the_longest():
    (share,) = plan_rows(
        [sample(n) for n in [2, 16, 3, 9, 7, 4]],
        world_size=1, max_tokens=32, vocab_size=10, packed=True,
    )  # fmt: skip
    assert [(mb.indices, mb.row_sizes) for mb in share] == [((1, 3, 4), (1, 2)), ((5, 2, 0), (3,))]


@given(st.lists(st.integers(1, 32), max_size=40), st.integers(1, 5), st.sampled_from([32, 50, 200]))
def test_packed_rows_fit_the_budget_and_lose_no_sample(
    lengths: list[int], world_size: int, max_tokens: int
):
    samples = [sample(n) for n in lengths]
    ranks = plan_rows(
        samples, world_size=world_size, max_tokens=max_tokens, vocab_size=10, packed=True
    )
    assert len({len(share) for share in ranks}) == 1
    every = [mb for share in ranks for mb in share]
    assert sorted(i for mb in every for i in mb.indices) == [*range(len(lengths))]
    assert all(collate(mb, CPU).input_ids_BT.numel() <= max_tokens for mb in every)


def test_in_a_packed_row_positions_begin_again_with_each_sample():
    one, two = (
        Sample(np.array([4, 5, 6, 7]), np.array([1, 3])),
        Sample(np.array([9, 3]), np.array([1])),
    )
    layout = collate(MicroBatch((one, two, one), (0, 1, 2), 1, row_sizes=(2, 1)), CPU)
    assert layout.input_ids_BT.tolist() == [[4, 5, 6, 9], [4, 5, 6, 0]]
    assert layout.positions_BT.tolist() == [[0, 1, 2, 0], [0, 1, 2, 0]]
    assert layout.index_N.tolist() == [0, 2, 3, 4, 6]
    assert layout.targets_N.tolist() == [5, 7, 3, 5, 7]


def test_a_rank_without_work_gets_empty_micro_batches():
    first, second = plan([5], world_size=2)
    assert [mb.indices for mb in first] == [(0,)]
    assert [mb.indices for mb in second] == [()]


def test_every_rank_cuts_the_head_into_as_many_chunks(monkeypatch: pytest.MonkeyPatch):
    """Each chunk gathers the head's weight, which all ranks must do equally often."""
    monkeypatch.setattr(microbatch, "LOGITS_PER_CHUNK", 10)
    samples = [Sample(np.arange(9), np.arange(1, 9)), sample(2)]
    ranks = plan_rows(samples, world_size=2, max_tokens=8, vocab_size=5)
    assert [[mb.head_chunks for mb in share] for share in ranks] == [[4], [4]]


def test_a_sequence_longer_than_the_budget_names_the_flag():
    with pytest.raises(
        UsageError, match=r"41 tokens does not fit train\.max_tokens_per_gpu \(32\)"
    ):
        plan([40])


def test_the_token_at_t_is_read_from_the_hidden_state_at_t_minus_one():
    one = Sample(np.array([4, 5, 6, 7, 8]), np.array([1, 4]))
    two = Sample(np.array([9, 3, 2]), np.array([2]))
    layout = collate(MicroBatch((one, two), (0, 1), 1), CPU)
    assert layout.input_ids_BT.tolist() == [[4, 5, 6, 7], [9, 3, 0, 0]]
    assert layout.index_N.tolist() == [0, 3, 4 + 1]
    assert layout.targets_N.tolist() == [5, 8, 2]


def test_an_empty_micro_batch_asks_for_no_token():
    layout = collate(MicroBatch((), (), 1), CPU)
    assert layout.input_ids_BT.shape == (1, 1)
    assert layout.index_N.numel() == layout.targets_N.numel() == 0


def test_a_field_that_only_some_samples_have_is_an_error():
    mixed = MicroBatch((sample(2).with_fields(weights=[1.0]), sample(2)), (0, 1), 1)
    with pytest.raises(ValueError, match="1 of 2 samples have no weights"):
        token_field(mixed, "weights", CPU)
    assert token_field(mixed, "returns", CPU) is None
