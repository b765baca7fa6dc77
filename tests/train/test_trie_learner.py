"""The learner's gradients of a batch that shares prefixes, under ZeRO-3, against plain torch on
separate sequences."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from learner_parts import full_logprobs, make_config, small_llama, weighted
from trie_parts import forked
from trie_ranks import gradients, samples

from agentrl.train.distributed import RankGroup
from agentrl.train.learner import Learner


@pytest.fixture(scope="module")
def separate() -> dict[str, torch.Tensor]:
    model = small_llama()
    for sample in samples():
        weights = torch.from_numpy(-sample.advantages * sample.weights)
        (weights * full_logprobs(model, sample)).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    file = tmp_path_factory.mktemp("trie-ranks") / "gradients.pt"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
        *(str(Path(__file__).with_name("trie_ranks.py")), str(file)),
    ]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, torch.Tensor]] = torch.load(file, weights_only=True)
    return found


def relative_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    difference = torch.cat([(found[name] - expected[name]).flatten() for name in expected])
    return float(difference.norm() / torch.cat([x.flatten() for x in expected.values()]).norm())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_rank_gets_the_gradients_of_separate_sequences(separate, checkpointing: bool):
    found = gradients(RankGroup(), checkpointing=checkpointing)
    assert relative_error(found, separate) < 1e-6


@pytest.mark.parametrize("activations", ["kept", "again"])
def test_two_ranks_get_them_too(separate, two_ranks, activations: str):
    assert relative_error(two_ranks[activations], separate) < 1e-6


def test_scores_come_back_to_the_samples_that_asked():
    batch = weighted(forked())
    learner = Learner(small_llama(), make_config())
    model = small_llama()
    for scores, sample in zip(learner.score(batch), batch, strict=True):
        expected = full_logprobs(model, sample).detach()
        torch.testing.assert_close(torch.from_numpy(scores.logprobs), expected, atol=1e-5, rtol=0)
    learner.close()


@pytest.mark.parametrize(("sharing", "computed"), [("trie", 28 + 4 + 6 + 5), ("padded", 6 * 32)])
def test_given_and_computed_tokens_are_counted(sharing: str, computed: int):
    """Six sequences, of which the second to the fifth add 4, 6, 0 and 0 nodes to the 28 of the
    first, and the last its own 5; or six rows as long as the longest."""
    learner = Learner(small_llama(), make_config(train={"prefix_sharing": sharing}))
    batch = weighted(forked())
    sums, _ = learner.forward_backward(batch, learner.config.algo)
    learner.step()
    learner.close()
    assert sums["tokens_given"] == 28 + 24 + 32 + 28 + 22 + 5
    assert sums["tokens_computed"] == computed
