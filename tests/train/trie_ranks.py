"""Run under torchrun: gradients of tries on two ranks, written to the file given as argument."""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from deepspeed.utils import safe_get_full_grad
from learner_parts import VOCAB, make_config, small_llama, weighted
from trie_parts import forked

from agentrl.train.batch import Sample
from agentrl.train.distributed import RankGroup
from agentrl.train.scorer import policy_names
from agentrl.train.trie_plan import plan_tries
from agentrl.train.worker import LearnerWorker

MAX_TOKENS = 32
"""Two of the longer samples do not fit beside each other unless they share."""


def samples() -> list[Sample]:
    """Without old log-probabilities the gradient is that of the plain policy gradient."""
    return weighted([replace(sample, old_logprobs=None) for sample in forked()])


def gradients(group: RankGroup, *, checkpointing: bool) -> dict[str, torch.Tensor]:
    """What `forward_backward` leaves on all ranks together, by name."""
    config = make_config(
        train={"max_tokens_per_gpu": MAX_TOKENS, "gradient_checkpointing": checkpointing},
        rollout={"max_tokens": MAX_TOKENS, "max_new_tokens": MAX_TOKENS},
    )
    worker = LearnerWorker(group, small_llama(), config)
    assert worker.shares_prefixes
    plan = plan_tries(
        samples(),
        world_size=group.world_size,
        max_tokens=MAX_TOKENS,
        vocab_size=VOCAB,
        token_cost=100,
    )
    worker.forward_backward(plan[group.rank], config.algo)
    found = {
        name: safe_get_full_grad(parameter).clone()
        for name, parameter in policy_names(worker.scorer)
    }
    worker.close()
    return found


def main() -> None:
    group = RankGroup()
    found = {name: gradients(group, checkpointing=name == "again") for name in ("kept", "again")}
    if group.rank == 0:
        torch.save(found, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
