"""How far the sampler is from the learner, on the tokens whose log-probabilities the engine gave.

In training that costs nothing, since the update scores them anyway. An evaluation scores a few of
its episodes for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from agentrl.engines.mismatch import mismatch_metrics
from agentrl.train.batch import Sample, build_samples
from agentrl.train.microbatch import temperatures_on
from agentrl.train.scorer import TokenScorer
from agentrl.types import Trajectory

__all__ = ["plain_logprobs", "sample_mismatch", "samples_to_compare"]

COMPARED_TOKENS = 8192
"""An evaluation compares the first episodes that together hold no more tokens."""


def sample_mismatch(
    samples: Sequence[Sample], logprobs: Iterable[NDArray[np.float32]]
) -> dict[str, float]:
    """Sampler against learner; nothing where the sampler reported no log-probabilities.

    Args:
        samples: those that the sampler reported nothing of are left out, and so are greedy tokens,
            which have no distribution to compare.
        logprobs: of each sample by the learner, [R].
    """
    pairs = [
        (sample.sampler_logprobs[sample.at_random], learner_R[sample.at_random])
        for sample, learner_R in zip(samples, logprobs, strict=True)
        if sample.sampler_logprobs is not None
    ]
    if not pairs:
        return {}
    sampler_N, learner_N = (np.concatenate(side) for side in zip(*pairs, strict=True))
    return mismatch_metrics(sampler_N, learner_N, np.ones(len(learner_N), dtype=np.bool_))


def samples_to_compare(trajectories: Sequence[Trajectory]) -> list[Sample]:
    """The samples of the first episodes whose log-probabilities the engine was asked for."""
    chosen, tokens = [], 0
    for trajectory in trajectories:
        sequences = trajectory.sequences
        if not sequences or any(sequence.logprobs is None for sequence in sequences):
            continue
        tokens += sum(len(sequence) for sequence in sequences)
        if tokens > COMPARED_TOKENS:
            break
        chosen.append(trajectory)
    return build_samples(chosen, range(len(chosen)))


@torch.no_grad()
def plain_logprobs(policy: PreTrainedModel, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
    """Log-probabilities under a model that no learner holds: [R] of each sample."""
    scorer = TokenScorer(policy.eval(), temperature=1.0)
    found = []
    for sample in samples:
        ids_T = torch.tensor(sample.token_ids, dtype=torch.int64, device=policy.device)
        positions_R = torch.tensor(sample.positions, dtype=torch.int64, device=policy.device)
        scores = scorer(
            ids_T[None, :-1],
            positions_R - 1,
            ids_T[positions_R],
            temperatures_N=temperatures_on(sample.temperatures, policy.device),
        )
        found.append(scores.logprobs_N.cpu().numpy())
    return found
