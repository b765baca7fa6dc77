"""Micro-batches that fit a device, the same number on every rank, and how they are laid out.

They are planned by `trie_plan` and `row_plan`. Under ZeRO-3 every rank must run the same sequence
of modules, so that ranks with less to do get empty micro-batches and every rank cuts the
language-model head into the same number of chunks.

Shapes: B rows of T inputs each (one row for a trie), R sampled tokens of the samples, N distinct
questions to the model: as many as R in rows, at most as many in a trie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.train.batch import Sample, sample_field
from agentrl.train.tree_attention import TreePlan, compiled_size
from agentrl.train.trie import TokenTrie

__all__ = [
    "MicroBatch",
    "TokenLayout",
    "collate",
    "padded_size",
    "routes_on",
    "same_rounds",
    "temperatures_on",
    "token_field",
]

LOGITS_PER_CHUNK = 2**27
"""Logits that the head makes at once (512 MiB in float32)."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples that go through the model together, and where they stand in the caller's list."""

    samples: tuple[Sample, ...]
    indices: tuple[int, ...]
    head_chunks: int
    as_trie: bool = False
    chunks: int = 1
    """Into how many passes a trie is cut that does not fit one (see `trie_chunks`)."""
    row_sizes: tuple[int, ...] | None = None
    """How many of the samples, in their order, stand in each row; None: one."""

    @property
    def num_sampled(self) -> int:
        """R."""
        return sum(sample.num_sampled for sample in self.samples)

    @property
    def num_given(self) -> int:
        """Inputs of the samples, shared ones as often as they occur."""
        return sum(sample.num_inputs for sample in self.samples)


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """What a forward pass needs: input_ids[B, T]; for each question the index[N] of the hidden
    state that answers it (in B * T) and the token asked for, targets[N]; all int64.

    expand[R] says which question each sampled token is, None where they are the same; `tree` what
    the attention of a trie needs; positions[B, T], where rows hold several sequences, begin with 0
    for each; temperatures[N], float32, divide the logits of each question (None: the scorer's);
    routes[B * T, layers, k] are the experts to replay.
    """

    input_ids_BT: Tensor
    index_N: Tensor
    targets_N: Tensor
    expand_R: Tensor | None = None
    tree: TreePlan | None = None
    positions_BT: Tensor | None = None
    temperatures_N: Tensor | None = None
    routes: Tensor | None = None


def same_rounds(
    rounds: Sequence[Sequence[Sequence[int]]],
    samples: Sequence[Sample],
    *,
    vocab_size: int,
    as_trie: bool,
    ranks: int,
    chunks: Sequence[int] | None = None,
) -> list[list[MicroBatch]]:
    """Make micro-batches of rounds, each of which names the samples of every rank by index.

    `chunks` has the number of passes of each round; without it, each is one.
    """
    plan: list[list[MicroBatch]] = [[] for _ in range(ranks)]
    for dealt, passes in zip(rounds, chunks or [1] * len(rounds), strict=True):
        sampled = max(sum(samples[i].num_sampled for i in indices) for indices in dealt)
        head_chunks = max(1, -(-sampled * vocab_size // LOGITS_PER_CHUNK))
        for share, indices in zip(plan, dealt, strict=True):
            members = tuple(samples[i] for i in indices)
            share.append(MicroBatch(members, tuple(indices), head_chunks, as_trie, passes))
    return plan


def collate(micro_batch: MicroBatch, device: torch.device) -> TokenLayout:
    """Lay the samples of a micro-batch out as one trie or as padded rows.

    An empty micro-batch is one row of one token of which nothing is asked.
    """
    return _as_trie(micro_batch, device) if micro_batch.as_trie else _as_rows(micro_batch, device)


def _as_trie(micro_batch: MicroBatch, device: torch.device) -> TokenLayout:
    trie = TokenTrie.build(micro_batch.samples)
    trie = trie.padded(padded_size(max(trie.num_nodes, 1), device))
    asked = trie.questions()
    return TokenLayout(
        torch.from_numpy(trie.token_ids).to(device).unsqueeze(0),
        torch.from_numpy(asked.nodes).to(device),
        torch.from_numpy(asked.targets).to(device),
        torch.from_numpy(asked.expand).to(device),
        TreePlan(trie.positions, trie.subtree_end, device),
        temperatures_N=temperatures_on(asked.temperatures, device),
        routes=routes_on(trie.routed_experts, device),
    )


def temperatures_on(
    temperatures: NDArray[np.float32] | None, device: torch.device
) -> Tensor | None:
    """Temperatures as they divide logits: greedy tokens are scored at 1, as engines report them."""
    if temperatures is None:
        return None
    return torch.from_numpy(np.where(temperatures > 0, temperatures, np.float32(1))).to(device)


def routes_on(routes: NDArray[np.int16] | None, device: torch.device) -> Tensor | None:
    """Experts to replay, as indices."""
    return None if routes is None else torch.from_numpy(routes.astype(np.int64)).to(device)


def padded_size(size: int, device: torch.device) -> int:
    """To how many nodes a trie is filled up: on a GPU, every size would be compiled anew."""
    return compiled_size(size) if device.type == "cuda" and size else size


def _as_rows(micro_batch: MicroBatch, device: torch.device) -> TokenLayout:
    """Padding is on the right, where causal attention keeps it from every token before it, so that
    no mask is needed."""
    samples = micro_batch.samples
    row_sizes = micro_batch.row_sizes or (1,) * len(samples)
    row_of = np.repeat(np.arange(len(row_sizes)), row_sizes)
    lengths = np.array([sample.num_inputs for sample in samples], dtype=np.int64)
    # Where each sample begins in its row: what the samples before it there have.
    begins = np.cumsum(lengths) - lengths
    begins -= np.append(begins, 0)[np.searchsorted(row_of, row_of)]
    width = int((begins + lengths).max(initial=1))
    input_ids_BT = np.zeros((max(len(row_sizes), 1), width), dtype=np.int64)
    positions_BT = np.zeros_like(input_ids_BT)
    index: list[NDArray[np.integer]] = [np.empty(0, np.int64)]
    targets: list[NDArray[np.integer]] = [np.empty(0, np.int64)]
    for sample, row, begin in zip(samples, row_of.tolist(), begins.tolist(), strict=True):
        own = slice(begin, begin + sample.num_inputs)
        input_ids_BT[row, own] = sample.token_ids[:-1]
        positions_BT[row, own] = np.arange(sample.num_inputs)
        index.append(row * width + begin + sample.positions - 1)
        targets.append(sample.token_ids[sample.positions])
    packed = micro_batch.row_sizes is not None
    routes = _routes_of_rows(samples, row_of * width + begins, input_ids_BT.size)
    return TokenLayout(
        torch.from_numpy(input_ids_BT).to(device),
        torch.from_numpy(np.concatenate(index, dtype=np.int64)).to(device),
        torch.from_numpy(np.concatenate(targets, dtype=np.int64)).to(device),
        positions_BT=torch.from_numpy(positions_BT).to(device) if packed else None,
        temperatures_N=temperatures_on(sample_field(samples, "temperatures"), device),
        routes=routes_on(routes, device),
    )


def _routes_of_rows(
    samples: Sequence[Sample], begins: NDArray[np.int64], size: int
) -> NDArray[np.int16] | None:
    """The experts of `size` places, of which each sample's begin where `begins` says."""
    given = [sample.routed_experts for sample in samples]
    known = [routes for routes in given if routes is not None]
    if not known:
        return None
    laid = np.full((size, *known[0].shape[1:]), -1, dtype=np.int16)
    for begin, routes in zip(begins.tolist(), given, strict=True):
        if routes is not None:
            laid[begin : begin + len(routes)] = routes
    return laid


def token_field(micro_batch: MicroBatch, name: str, device: torch.device) -> Tensor | None:
    """One [R] field of all samples as float32 [N]; None when they do not have it.

    Raises:
        ValueError: some samples have it and some do not.
    """
    flat = sample_field(micro_batch.samples, name)
    return None if flat is None else torch.from_numpy(flat).to(device)
