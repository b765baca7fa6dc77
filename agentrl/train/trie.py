"""The token trie of a batch: every distinct prefix once.

Sequences of a group share their prompt, turns share their history, rewritten histories fork off it,
and repeated responses are the same path. A node is one (prefix, token); its hidden state is the
same for every sequence that runs through it, so that it is computed once, forwards and backwards.
Where the experts of tokens are replayed, a token that went elsewhere is another node.

Nodes stand in depth-first order, where the descendants of a node follow it directly. A node's
position is its depth, and node q attends to node k where `k <= q < subtree_end[k]`: to itself and
its ancestors. What the loss wants of a token stays with its sample: a node may be asked for many.

Shapes: T nodes, R sampled tokens of all samples together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentrl.train.batch import Sample, sample_field

__all__ = ["Questions", "TokenTrie", "prefix_order"]

Ints = NDArray[np.int64]


class Questions(NamedTuple):
    """What is asked of a model: distinct (node, target, temperature), ascending by node.

    nodes[N], targets[N], temperatures[N] float32 (None: the same for all), and expand[R], which
    question each sampled token is.
    """

    nodes: Ints
    targets: Ints
    temperatures: NDArray[np.float32] | None
    expand: Ints


@dataclass(frozen=True, slots=True)
class TokenTrie:
    """Distinct inputs of a batch in depth-first order, and where each sampled token is read.

    token_ids[T], positions[T] (depths) and subtree_end[T] (one past the last descendant) describe
    the nodes; index[R] is the node whose hidden state predicts each sampled token, targets[R] the
    token itself, temperatures[R] what it was sampled at (None: the same for all), in the order of
    the samples and their tokens. All int64 but the temperatures, float32. routed_experts int16
    [T, layers, k]: where each node goes (None: where the model sends it).
    """

    token_ids: Ints
    positions: Ints
    subtree_end: Ints
    index: Ints
    targets: Ints
    temperatures: NDArray[np.float32] | None = None
    routed_experts: NDArray[np.int16] | None = None

    @classmethod
    def build(cls, samples: Sequence[Sample]) -> TokenTrie:
        """Merge the inputs of `samples` (their last token is a target only, never an input).

        The work is linear in the tokens but for the sorting of the samples, which compares bytes.
        """
        order, shared = prefix_order(samples)
        lengths = np.array([samples[i].num_inputs for i in order], dtype=np.int64)
        token_ids = np.empty(int((lengths - shared).sum()), dtype=np.int64)
        positions, subtree_end = np.empty_like(token_ids), np.empty_like(token_ids)
        routes: list[NDArray[np.int16]] = []
        path = np.empty(int(lengths.max(initial=0)), dtype=np.int64)
        index: list[Ints] = [np.empty(0, dtype=np.int64)] * len(samples)
        count = open_until = 0
        for i, fork, length in zip(order, shared.tolist(), lengths.tolist(), strict=True):
            subtree_end[path[fork:open_until]] = count
            new = slice(count, count + length - fork)
            token_ids[new] = samples[i].token_ids[fork:length]
            positions[new] = np.arange(fork, length)
            if (sample_routes := samples[i].routed_experts) is not None:
                routes.append(sample_routes[fork:length])
            path[fork:length] = np.arange(new.start, new.stop)
            index[i] = path[samples[i].positions - 1]
            count, open_until = new.stop, length
        subtree_end[path[:open_until]] = count
        targets = [sample.token_ids[sample.positions] for sample in samples]
        empty = np.empty(0, dtype=np.int64)
        return cls(
            token_ids,
            positions,
            subtree_end,
            np.concatenate([empty, *index]),
            np.concatenate([empty, *targets], dtype=np.int64),
            sample_field(samples, "temperatures"),
            np.concatenate(routes) if routes else None,
        )

    @property
    def num_nodes(self) -> int:
        """T."""
        return len(self.token_ids)

    def questions(self) -> Questions:
        """The distinct ones, so that repeated responses share the head too."""
        base = self.targets.max(initial=0) + 1
        keys, degrees = self.index * base + self.targets, None
        if self.temperatures is not None:
            degrees, degree_R = np.unique(self.temperatures, return_inverse=True)
            keys = keys * len(degrees) + degree_R
        found, expand = np.unique(keys, return_inverse=True)
        temperatures = None
        if degrees is not None:
            temperatures, found = degrees[found % len(degrees)], found // len(degrees)
        return Questions(found // base, found % base, temperatures, expand)

    def padded(self, size: int) -> TokenTrie:
        """Add nodes up to `size` that no other sees and that are asked for nothing.

        They see themselves alone; behind a single path they prolong it, so that it stays one.
        """
        ends = np.append(self.subtree_end, np.arange(self.num_nodes, size) + 1)
        if (self.subtree_end == self.num_nodes).all():
            ends = np.full(size, size, dtype=np.int64)
        missing = np.zeros(size - self.num_nodes, dtype=np.int64)
        routes = self.routed_experts
        if routes is not None:
            free = np.full((len(missing), *routes.shape[1:]), -1, dtype=np.int16)
            routes = np.concatenate([routes, free])
        return replace(
            self,
            token_ids=np.append(self.token_ids, missing),
            positions=np.append(self.positions, missing),
            subtree_end=ends,
            routed_experts=routes,
        )


def prefix_order(samples: Sequence[Sample]) -> tuple[list[int], Ints]:
    """Order samples so that those with a common prefix stand together.

    Returns:
        The samples' indices in depth-first order, and for each place in it how many inputs the
        sample shares with the one before (0 for the first): no other before it shares more.
    """
    inputs = _input_names(samples)
    keys = [tokens.tobytes() for tokens in inputs]
    order = sorted(range(len(samples)), key=keys.__getitem__)
    shared = np.zeros(len(order), dtype=np.int64)
    for place in range(1, len(order)):
        before, here = inputs[order[place - 1]], inputs[order[place]]
        size = min(len(before), len(here))
        differing = np.flatnonzero(before[:size] != here[:size])
        shared[place] = differing[0] if len(differing) else size
    return order, shared


def _input_names(samples: Sequence[Sample]) -> list[NDArray[np.int32]]:
    """The inputs of each sample as numbers that are the same for what may share a node.

    Raises:
        ValueError: some samples have experts to replay and some do not.
    """
    tokens = [sample.token_ids[:-1].astype(np.int32) for sample in samples]
    routes = [s.routed_experts for s in samples if s.routed_experts is not None]
    if not routes:
        return tokens
    if len(routes) != len(samples):
        raise ValueError(f"{len(routes)} of {len(samples)} samples have experts to replay")
    flat = np.concatenate([route.reshape(len(route), -1) for route in routes])
    both = np.column_stack([np.concatenate(tokens), flat.astype(np.int32)])
    _, names = np.unique(both, axis=0, return_inverse=True)
    ends = np.cumsum([len(part) for part in tokens])[:-1]
    return [part.astype(np.int32) for part in np.split(names.reshape(-1), ends)]
