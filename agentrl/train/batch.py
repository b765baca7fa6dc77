"""Turns trajectories into samples: what the learner trains on, one for each sequence.

Shapes: T tokens of a sequence, R of them sampled by the policy. The log-probability of the token
at position t is read from the hidden state at t - 1, so that a sampled token needs one before it.
Nothing after the last sampled token is kept: it cannot influence any log-probability.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.types import Trajectory

__all__ = [
    "Sample",
    "build_samples",
    "episode_token_rewards",
    "join_episodes",
    "sample_field",
    "split_episodes",
]

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence ready for the learner; the fields that are None are filled in on the way.

    token_ids[T] int32, the last one sampled. positions[R] int32, ascending, where the sampled
    tokens stand. episode, the index of the trajectory that the sequence is of. All others [R]
    float32: log-probabilities by the sampler, by the policy before the update (denominator of the
    importance ratio; None: the current policy itself) and by the reference policy; values before
    the update; advantages; returns; weights in the loss (0: masked); temperatures at which the
    tokens were sampled (0: greedily; None: all at `rollout.temperature`). fresh[R] bool: which
    tokens are young enough to be trained on (None: all). routed_experts int16
    [T - 1, layers, k]: where the sampler sent each input (-1: unknown; None: not recorded).
    """

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    episode: int = 0
    sampler_logprobs: Floats | None = None
    old_logprobs: Floats | None = None
    reference_logprobs: Floats | None = None
    old_values: Floats | None = None
    advantages: Floats | None = None
    returns: Floats | None = None
    weights: Floats | None = None
    temperatures: Floats | None = None
    fresh: NDArray[np.bool_] | None = None
    routed_experts: NDArray[np.int16] | None = None

    def __post_init__(self) -> None:
        if len(self.positions) == 0:
            raise ValueError("a sample needs at least one sampled token")
        if self.positions[0] < 1:
            raise ValueError("the first token of a sequence cannot be a sampled one: nothing is "
                             "before it that could predict it")  # fmt: skip
        if self.positions[-1] != len(self.token_ids) - 1:
            raise ValueError("a sample must end with its last sampled token")
        for name in self.__slots__[3:-1]:
            value = getattr(self, name)
            if value is not None and value.shape != self.positions.shape:
                raise ValueError(f"{name} has shape {value.shape}, must be {self.positions.shape}")

        routes = self.routed_experts
        if routes is not None and len(routes) != self.num_inputs:
            raise ValueError(f"{len(routes)} inputs have experts, must be {self.num_inputs}")

    @property
    def num_inputs(self) -> int:
        """Tokens that go through the model: all but the last."""
        return len(self.token_ids) - 1

    @property
    def num_sampled(self) -> int:
        """R."""
        return len(self.positions)

    @property
    def at_random(self) -> NDArray[np.bool_]:
        """Which sampled tokens were drawn, [R]. A greedy one had no alternative: no policy gradient
        says anything of it."""
        if self.temperatures is None:
            return np.ones(self.num_sampled, dtype=np.bool_)
        return self.temperatures > 0

    @property
    def trains(self) -> NDArray[np.bool_]:
        """Which sampled tokens give a gradient, [R]: drawn at random, and young enough."""
        return self.at_random if self.fresh is None else self.at_random & self.fresh

    @property
    def num_trained(self) -> int:
        """How many tokens give a gradient."""
        return int(self.trains.sum())

    def with_fields(self, **arrays: Any) -> Sample:
        """A copy with some [R] arrays set, as float32."""
        fields: dict[str, Any] = {k: np.asarray(v, dtype=np.float32) for k, v in arrays.items()}
        return replace(self, **fields)


def build_samples(
    trajectories: Sequence[Trajectory], episodes: Iterable[int], *, oldest: int | None = None
) -> list[Sample]:
    """Make a sample of every sequence with sampled tokens of the trajectories `episodes` names.

    Tokens of a version before `oldest` are no longer `fresh`.

    Raises:
        ValueError: a sequence begins with a sampled token.
    """
    samples = []
    for episode in episodes:
        for sequence in trajectories[episode].sequences:
            positions_R = np.flatnonzero(sequence.response_mask).astype(np.int32)
            if len(positions_R) == 0:
                continue
            logprobs_T, routes_T = sequence.logprobs, sequence.routed_experts
            temperatures_T = np.ones(len(sequence), dtype=np.float32)
            for turn in sequence.turns:
                temperatures_T[turn.start : turn.end] = turn.temperature
            samples.append(
                Sample(
                    token_ids=sequence.token_ids[: positions_R[-1] + 1],
                    positions=positions_R,
                    episode=episode,
                    sampler_logprobs=None if logprobs_T is None else logprobs_T[positions_R],
                    temperatures=temperatures_T[positions_R],
                    fresh=None
                    if oldest is None
                    else sequence.weight_versions[positions_R] >= oldest,
                    routed_experts=None if routes_T is None else routes_T[: positions_R[-1]],
                )
            )
    return samples


def sample_field(samples: Sequence[Sample], name: str) -> Floats | None:
    """One [R] field of all samples, in their order; None when they do not have it.

    Raises:
        ValueError: some samples have it and some do not.
    """
    arrays = [getattr(sample, name) for sample in samples]
    missing = sum(array is None for array in arrays)
    if arrays and missing == len(arrays):
        return None
    if missing:
        raise ValueError(f"{missing} of {len(arrays)} samples have no {name}")
    return np.concatenate([np.empty(0, np.float32), *arrays], dtype=np.float32)


def episode_token_rewards(trajectory: Trajectory) -> NDArray[np.float64]:
    """Lay an episode's reward on its own tokens, in the order of its sequences.

    A turn's reward is received after its last token; what the episode's reward has beyond them
    is received after the last token of all. Returns one number for each sampled token, float64.
    """
    rewards_R = np.zeros(trajectory.num_sampled)
    if len(rewards_R) == 0 or trajectory.reward is None:
        return rewards_R
    sampled = 0
    for sequence in trajectory.sequences:
        for turn in sorted(sequence.turns, key=lambda turn: turn.start):
            sampled += turn.end - turn.start
            # A turn without tokens adds to the one before it.
            rewards_R[max(sampled - 1, 0)] += turn.reward or 0.0
    rewards_R[-1] += trajectory.reward - rewards_R.sum()
    return rewards_R


def join_episodes(
    arrays: Sequence[NDArray[Any]], samples: Sequence[Sample], num_episodes: int
) -> list[NDArray[np.float64]]:
    """Put the [R] arrays of samples together by episode; an episode without samples gets [0]."""
    parts: list[list[NDArray[Any]]] = [[] for _ in range(num_episodes)]
    for array, sample in zip(arrays, samples, strict=True):
        parts[sample.episode].append(array)
    return [np.concatenate(part, dtype=np.float64) if part else np.empty(0) for part in parts]


def split_episodes(
    arrays: Sequence[NDArray[np.float64]], samples: Sequence[Sample]
) -> list[NDArray[np.float64]]:
    """Undo `join_episodes`: give each sample its own [R] part of its episode's array."""
    taken = [0] * len(arrays)
    parts = []
    for sample in samples:
        start = taken[sample.episode]
        taken[sample.episode] = start + sample.num_sampled
        parts.append(arrays[sample.episode][start : taken[sample.episode]])
    return parts
