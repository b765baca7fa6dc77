import torch
from torch import nn

from agentrl.train.zero import buckets


def partitioned(numel: int) -> nn.Parameter:
    """As ZeRO-3 leaves it: no elements of its own, and how many it has when it is whole."""
    parameter = nn.Parameter(torch.empty(0))
    parameter.ds_numel = numel
    return parameter


def test_buckets_are_filled_by_the_whole_size_of_partitioned_parameters():
    """`numel()` of each is 0 (TRL PR#6386)."""
    named = [
        (name, partitioned(numel)) for name, numel in zip("abcde", (4, 5, 2, 30, 1), strict=True)
    ]
    names = [[name for name, _ in bucket] for bucket in buckets(named, 10)]
    assert names == [["a", "b"], ["c"], ["d"], ["e"]]


def test_no_parameters_make_no_bucket():
    assert list(buckets([], 10)) == []
