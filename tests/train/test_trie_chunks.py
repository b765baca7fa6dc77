"""A trie that goes through in several passes, against the same trie in one."""

import numpy as np
import pytest
import torch
from deepspeed.utils import safe_get_full_grad
from learner_parts import make_config, weighted
from trie_parts import Gradients, forked, level_llama, relative_error

from agentrl.config import AlgoConfig
from agentrl.train.batch import Sample
from agentrl.train.distributed import RankGroup
from agentrl.train.microbatch import MicroBatch
from agentrl.train.objective import Sums
from agentrl.train.scorer import policy_names
from agentrl.train.trie_chunks import TrieChunks
from agentrl.train.worker import LearnerWorker, SampleScores

LOSSES = {
    "clip": {"loss": {"kind": "ppo"}, "entropy_coef": 0.1},
    "whole sequences": {"loss": {"kind": "gspo", "clip_ratio_low": 0.3, "clip_ratio_high": 0.3}},
    "values": {"advantage": {"estimator": "gae"}, "value": {"coef": 0.5}},
    "sequence weights": {"correction": {"kind": "seq_tis", "high": 1.5}},
    "reference": {"kl": {"coef": 0.1, "estimator": "k3"}},
}


def batch() -> list[Sample]:
    """With every field that a loss may want."""
    generator = np.random.default_rng(1)
    samples = []
    for sample in forked():
        noise = 0.1 * generator.normal(size=(4, sample.num_sampled))
        fields = {"sampler_logprobs": -3.1 + noise[0], "reference_logprobs": -3.0 + noise[1]}
        samples.append(sample.with_fields(**fields, old_values=noise[2], returns=1 + noise[3]))
    return weighted(samples)


def trained(algo: AlgoConfig, chunks: int) -> tuple[Gradients, Sums, list[SampleScores]]:
    samples = tuple(batch())
    worker = LearnerWorker(RankGroup(), level_llama(), make_config(algo=algo))
    if worker.scorer.value_head is not None:
        torch.nn.init.ones_(worker.scorer.value_head.weight)
    whole = MicroBatch(samples, tuple(range(len(samples))), 2, as_trie=True, chunks=chunks)
    sums, (scores,) = worker.forward_backward([whole], algo)
    named = [*policy_names(worker.scorer)]
    if worker.scorer.value_head is not None:
        named += worker.scorer.value_head.named_parameters()
    grads = {name: safe_get_full_grad(parameter).clone() for name, parameter in named}
    worker.close()
    return grads, sums, scores


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_has_the_gradient_scores_and_sums_of_one_pass(name: str):
    algo = AlgoConfig.model_validate(LOSSES[name])
    expected, expected_sums, expected_scores = trained(algo, 1)
    for chunks in (2, 7):
        found, sums, scores = trained(algo, chunks)
        assert relative_error(found, expected) < 1e-6
        assert sums == pytest.approx(expected_sums, rel=1e-5, abs=1e-6)
        for mine, theirs in zip(scores, expected_scores, strict=True):
            np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-5)


def test_more_passes_than_nodes_leave_some_empty():
    algo = AlgoConfig()
    expected, *_ = trained(algo, 1)
    found, *_ = trained(algo, 60)
    assert relative_error(found, expected) < 1e-6


def test_each_pass_knows_the_ancestors_of_its_first_node_and_how_far_they_reach():
    """Two sequences of six inputs that part after three: nodes 0 1 2 | 3 4 5 | 6 7 8, in passes of
    three, of which the last two go on from the first three nodes."""
    samples = tuple(
        Sample(np.array([1, 2, 3, *own, 0]), np.array([6])) for own in ([4, 5, 6], [7, 8, 9])
    )
    chunks = TrieChunks(MicroBatch(samples, (0, 1), 1, as_trie=True, chunks=3), torch.device("cpu"))
    passes = list(chunks.forwards())
    assert [each.input_ids_BT.tolist() for each in passes] == [
        [[1, 2, 3]],
        [[4, 5, 6]],
        [[7, 8, 9]],
    ]
    assert [each.tree.past.rows_P.tolist() for each in passes] == [[], [3, 3, 3], [3, 3, 3]]
    assert [each.index_N.tolist() for each in passes] == [[], [2], [2]]
