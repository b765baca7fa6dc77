from contextlib import closing

import numpy as np
import pytest
import torch
from learner_parts import make_config, random_sample, small_llama, weighted
from torch import nn

from agentrl.train.learner import Learner
from agentrl.train.zero import _adjacent, buckets


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


def test_a_step_uses_the_gradients_where_they_lie():
    """One flat gradient more would be as large as the model in float32."""
    generator = np.random.default_rng(0)
    samples = weighted([random_sample(generator, length=n, sampled=3) for n in (9, 20)])
    config = make_config(train={"max_tokens_per_gpu": 2048})
    with closing(Learner(small_llama(), config)) as learner:
        learner.forward_backward(samples, learner.config.algo)
        zero = learner._worker.engine.optimizer
        joined = [zero.flatten(gradients) for gradients in zero.averaged_gradients.values()]
        buffer = zero.grad_partitions_flat_buffer
        own = buffer.untyped_storage().data_ptr()
        assert [flat.untyped_storage().data_ptr() for flat in joined] == [own, own]
        assert torch.equal(torch.cat(joined), buffer)  # those that decay, and those that do not
        expected = float(buffer.double().norm())
        assert learner.step().grad_norm == pytest.approx(expected, rel=1e-12)


def test_tensors_that_do_not_lie_side_by_side_are_not_taken_for_one():
    flat = torch.arange(12.0)
    assert _adjacent([flat[:5], flat[5:12]])
    assert not _adjacent([flat[:5], flat[6:12]])
    assert not _adjacent([flat[5:], flat[:5]])
    assert not _adjacent([flat[:6].view(2, 3).t()])
