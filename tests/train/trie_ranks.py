"""The learner's gradients of tries; under torchrun on two ranks, written to the file given as
argument."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from deepspeed.utils import safe_get_full_grad
from hypothesis import HealthCheck, given, settings
from learner_parts import VOCAB, make_config, small_llama, weighted
from transformers import PreTrainedModel
from trie_parts import (
    Gradients,
    batches,
    forked,
    level_llama,
    relative_error,
    separate_gradients,
    spread,
)

from agentrl.train.batch import Sample
from agentrl.train.distributed import RankGroup
from agentrl.train.scorer import policy_names
from agentrl.train.trie_plan import plan_tries
from agentrl.train.worker import LearnerWorker

NUM_RANDOM = 30


def samples() -> list[Sample]:
    """Without old log-probabilities the gradient is that of the plain policy gradient."""
    return weighted([replace(sample, old_logprobs=None) for sample in forked()])


class TrieLearner:
    """A learner whose micro-batches hold few tokens; every rank makes the same calls."""

    def __init__(
        self, group: RankGroup, model: PreTrainedModel, *, max_tokens: int, checkpointing: bool
    ) -> None:
        # A step at this rate changes no weight, but forgets the gradient.
        train = {"lr": 1e-30, "max_tokens_per_gpu": max_tokens}
        self.config = make_config(
            train={**train, "gradient_checkpointing": checkpointing},
            rollout={"max_tokens": max_tokens, "max_new_tokens": max_tokens},
        )
        self.group = group
        self.worker = LearnerWorker(group, model, self.config)
        assert self.worker.sharing == "trie"

    def gradients(self, batch: list[Sample]) -> Gradients:
        """What `forward_backward` leaves on all ranks together, by name."""
        plan = plan_tries(
            batch,
            world_size=self.group.world_size,
            max_tokens=self.config.train.max_tokens_per_gpu,
            vocab_size=VOCAB,
            token_cost=100,
        )
        self.worker.forward_backward(plan[self.group.rank], self.config.algo)
        found = {
            name: safe_get_full_grad(parameter).clone()
            for name, parameter in policy_names(self.worker.scorer)
        }
        self.worker.step()
        return found


@contextmanager
def learner(
    group: RankGroup, model: PreTrainedModel, *, max_tokens: int, checkpointing: bool
) -> Iterator[TrieLearner]:
    built = TrieLearner(group, model, max_tokens=max_tokens, checkpointing=checkpointing)
    yield built
    built.worker.close()


def forked_gradients(group: RankGroup, *, checkpointing: bool) -> Gradients:
    """In micro-batches into which two of the longer samples only fit if they share."""
    with learner(group, small_llama(), max_tokens=32, checkpointing=checkpointing) as trie:
        return trie.gradients(samples())


def random_errors(group: RankGroup, *, checkpointing: bool) -> list[float]:
    """Relative errors of the gradients of random trees, the same trees on every rank."""
    errors: list[float] = []
    plain = level_llama()

    @settings(
        max_examples=NUM_RANDOM,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(batches())
    def collect(batch: list[Sample]) -> None:
        batch = spread(batch)
        errors.append(relative_error(trie.gradients(batch), separate_gradients(plain, batch)))

    # Trees are cut, and sequences that are longer go through in several passes.
    with learner(group, level_llama(), max_tokens=24, checkpointing=checkpointing) as trie:
        collect()
    return errors


def main() -> None:
    group = RankGroup()
    found = {
        name: {
            "forked": forked_gradients(group, checkpointing=name == "again"),
            "random": random_errors(group, checkpointing=name == "again"),
        }
        for name in ("kept", "again")
    }
    if group.rank == 0:
        torch.save(found, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
