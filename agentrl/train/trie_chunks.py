"""A trie that does not fit one pass, in passes over runs of its nodes (see `prefix_cache`).

In depth-first order, the ancestors that a run of nodes has outside of itself are those of its first
node: one path, which is cut off where the subtrees of its nodes end.

Shapes: T nodes, P ancestors before a chunk, N questions, R sampled tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.train.microbatch import (
    MicroBatch,
    TokenLayout,
    padded_size,
    routes_on,
    temperatures_on,
)
from agentrl.train.prefix_cache import ChunkPast, PrefixCache
from agentrl.train.tree_attention import TreePlan
from agentrl.train.trie import Questions, TokenTrie

__all__ = ["TrieChunks"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Nodes start .. end as a trie of their own, and what is before it: `path[P]`, the ancestors
    of the first node, and `rows[P]`, how many of the chunk's nodes descend from each."""

    start: int
    end: int
    trie: TokenTrie
    path: Ints
    rows: Ints


class TrieChunks:
    """The chunks of one micro-batch, in equal parts; a chunk of a small trie may be empty."""

    def __init__(self, micro_batch: MicroBatch, device: torch.device) -> None:
        trie = TokenTrie.build(micro_batch.samples)
        asked = trie.questions()
        self.num_nodes = trie.num_nodes
        self.expand_R = torch.from_numpy(asked.expand).to(device)
        bounds = np.linspace(0, trie.num_nodes, micro_batch.chunks + 1).astype(np.int64).tolist()
        self._chunks = [_cut(trie, asked, start, end) for start, end in pairwise(bounds)]
        self._cache = PrefixCache(max(trie.num_nodes, 1))
        self._device = device

    def forwards(self) -> Iterator[TokenLayout]:
        """The passes that fill the cache, in the order of the nodes; without gradient."""
        for chunk in self._chunks:
            yield self._layout(chunk, self._past(chunk, backward=False))

    def backwards(self) -> Iterator[tuple[slice, TokenLayout]]:
        """The passes that take the gradient, last chunk first, once the cache is filled.

        Each comes with the questions that it answers, of all N; its backward pass must be done
        before the next is drawn, the last one before the iterator ends.
        """
        end = sum(len(chunk.trie.index) for chunk in self._chunks)
        for chunk in reversed(self._chunks):
            past = self._past(chunk, backward=True)
            start = end - len(chunk.trie.index)
            yield slice(start, end), self._layout(chunk, past)
            past.collect()
            end = start

    def _past(self, chunk: _Chunk, *, backward: bool) -> ChunkPast:
        path, rows = chunk.path, chunk.rows
        # Rows of 0: what fills up is seen by no node.
        missing = padded_size(len(path), self._device) - len(path)
        path, rows = np.pad(path, (0, missing)), np.pad(rows, (0, missing))
        index = torch.from_numpy(path).to(self._device)
        return ChunkPast(self._cache, chunk.start, chunk.end, index, rows, backward=backward)

    def _layout(self, chunk: _Chunk, past: ChunkPast) -> TokenLayout:
        trie = chunk.trie.padded(padded_size(max(chunk.trie.num_nodes, 1), self._device))
        return TokenLayout(
            torch.from_numpy(trie.token_ids).to(self._device).unsqueeze(0),
            torch.from_numpy(trie.index).to(self._device),
            torch.from_numpy(trie.targets).to(self._device),
            tree=TreePlan(trie.positions, trie.subtree_end, self._device, past),
            temperatures_N=temperatures_on(trie.temperatures, self._device),
            routes=routes_on(trie.routed_experts, self._device),
        )


def _cut(trie: TokenTrie, asked: Questions, start: int, end: int) -> _Chunk:
    """Nodes start .. end with the questions to them."""
    path = np.flatnonzero(trie.subtree_end[:start] > start)
    own, part = slice(start, end), slice(*np.searchsorted(asked.nodes, [start, end]))
    chunk = TokenTrie(
        trie.token_ids[own],
        trie.positions[own],
        np.minimum(trie.subtree_end[own], end) - start,
        asked.nodes[part] - start,
        asked.targets[part],
        None if asked.temperatures is None else asked.temperatures[part],
        None if trie.routed_experts is None else trie.routed_experts[own],
    )
    rows = np.minimum(trie.subtree_end[path], end) - start
    return _Chunk(start, end, chunk, path, rows)
