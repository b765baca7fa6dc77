"""One micro-batch through the learner's engine: scores, and the gradient of a loss of them.

A trie that does not fit one pass goes through in chunks (`trie_chunks`). Its scores are taken
first, without gradient; the loss of all of them, whatever it makes of whole sequences, gives each
score its gradient; and each chunk takes those of its own scores back through the model. So the
gradient is that of one pass, for one more forward pass.

Shapes: N questions to the model, R sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from agentrl.train.flops import Work, work_of
from agentrl.train.microbatch import MicroBatch, TokenLayout, collate
from agentrl.train.objective import Sums
from agentrl.train.scorer import TokenScores
from agentrl.train.sequence_parallel import SequenceGroup
from agentrl.train.trie_chunks import TrieChunks

__all__ = ["Pass"]

LossOf: TypeAlias = Callable[[TokenScores], tuple[Tensor, Sums]]


class Pass:
    """A micro-batch on its way. All ranks do the same with micro-batches of as many chunks.

    Args:
        engine: DeepSpeed's, around a `TokenScorer`.
        micro_batch: what goes through it.
        device: of the engine.
        sequence: the ranks that compute it together, if several do.
    """

    def __init__(
        self,
        engine: Any,
        micro_batch: MicroBatch,
        device: torch.device,
        sequence: SequenceGroup | None = None,
    ) -> None:
        self._engine, self._micro_batch, self._device = engine, micro_batch, device
        self._sequence = sequence
        self.work = Work()
        """What the model has computed, each part of it once."""

    @torch.no_grad()
    def scores(self) -> TokenScores:
        """Scores [R] of the sampled tokens, without gradient."""
        self._engine.eval()
        if self._micro_batch.chunks == 1:
            return self._whole(entropy_grad=False)
        chunks = TrieChunks(self._micro_batch, self._device)
        return self._of_chunks(chunks).expand(chunks.expand_R)

    def backward(
        self,
        loss_of: LossOf,
        *,
        entropy_grad: bool,
        is_last: bool,
        scale: float,
    ) -> tuple[TokenScores, Sums]:
        """Add the gradient of `scale` times the loss; returns the scores [R] and the loss's sums.

        Args:
            loss_of: the loss of the scores, a scalar, and its sums; called once.
            entropy_grad: whether it takes a gradient through the entropy.
            is_last: whether a step follows.
            scale: what DeepSpeed divides by.
        """
        if self._micro_batch.chunks == 1:
            self._engine.train()
            self._engine.set_gradient_accumulation_boundary(is_last)
            scores = self._whole(entropy_grad=entropy_grad)
            loss, sums = loss_of(scores)
            self._engine.backward(loss * scale)
            return scores, sums
        return self._backward_in_chunks(loss_of, entropy_grad, is_last, scale)

    def _backward_in_chunks(
        self,
        loss_of: LossOf,
        entropy_grad: bool,
        is_last: bool,
        scale: float,
    ) -> tuple[TokenScores, Sums]:
        chunks = TrieChunks(self._micro_batch, self._device)
        self._engine.eval()
        with torch.no_grad():
            questions = self._of_chunks(chunks)
        leaves = [x.requires_grad_() for x in questions if x is not None]
        scores = questions.expand(chunks.expand_R)
        loss, sums = loss_of(scores)
        grads = torch.autograd.grad(loss * scale, leaves, materialize_grads=True)
        self._engine.train()
        passes_left = self._micro_batch.chunks
        for asked, layout in chunks.backwards():
            passes_left -= 1
            self._engine.set_gradient_accumulation_boundary(is_last and passes_left == 0)
            part = [x for x in self._forward(layout, entropy_grad) if x is not None]
            parts = [(x * grad[asked]).sum() for x, grad in zip(part, grads, strict=True)]
            self._engine.backward(torch.stack(parts).sum())
        return scores, sums

    def _whole(self, *, entropy_grad: bool) -> TokenScores:
        layout = collate(self._micro_batch, self._device)
        self.work = work_of(layout) if self._micro_batch.samples else Work()
        return self._forward(layout, entropy_grad).expand(layout.expand_R)

    def _of_chunks(self, chunks: TrieChunks) -> TokenScores:
        """Scores [N] of all questions."""
        parts, self.work = [], Work()
        for layout in chunks.forwards():
            parts.append(self._forward(layout, False))
            self.work += work_of(layout)
        logprobs, entropies, values = zip(*parts, strict=True)
        no_values = any(value is None for value in values)
        return TokenScores(
            torch.cat(logprobs), torch.cat(entropies), None if no_values else torch.cat(values)
        )

    def _forward(self, layout: TokenLayout, entropy_grad: bool) -> TokenScores:
        forward = partial(self._own_part, entropy_grad=entropy_grad)
        return forward(layout) if self._sequence is None else self._sequence.run(forward, layout)

    def _own_part(self, layout: TokenLayout, entropy_grad: bool) -> TokenScores:
        scores: TokenScores = self._engine(
            layout.input_ids_BT,
            layout.index_N,
            layout.targets_N,
            head_chunks=self._micro_batch.head_chunks,
            entropy_grad=entropy_grad,
            tree=layout.tree,
            positions_BT=layout.positions_BT,
            temperatures_N=layout.temperatures_N,
            routes=layout.routes,
        )
        return scores
