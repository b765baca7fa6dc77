"""The learner's gradients of a batch that shares prefixes, under ZeRO-3, against plain torch on
separate sequences."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_parts import full_logprobs, make_config, small_llama, weighted
from trie_parts import Gradients, forked, relative_error, separate_gradients
from trie_ranks import NUM_RANDOM, forked_gradients, random_errors, samples

from agentrl.train.distributed import RankGroup
from agentrl.train.learner import Learner


@pytest.fixture(scope="module")
def separate() -> Gradients:
    return separate_gradients(small_llama(), samples())


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
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
    found: dict[str, Any] = torch.load(file, weights_only=True)
    return found


@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_rank_gets_the_gradients_of_separate_sequences(separate, checkpointing: bool):
    found = forked_gradients(RankGroup(), checkpointing=checkpointing)
    assert relative_error(found, separate) < 1e-6


@pytest.mark.parametrize("checkpointing", [False, True])
def test_on_random_trees_too(checkpointing: bool):
    errors = random_errors(RankGroup(), checkpointing=checkpointing)
    assert len(errors) >= NUM_RANDOM
    assert max(errors) < 1e-6


@pytest.mark.parametrize("activations", ["kept", "again"])
def test_two_ranks_get_them_too(separate, two_ranks, activations: str):
    assert relative_error(two_ranks[activations]["forked"], separate) < 1e-6
    assert len(two_ranks[activations]["random"]) >= NUM_RANDOM
    assert max(two_ranks[activations]["random"]) < 1e-6


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
