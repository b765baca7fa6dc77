"""Ulysses sequence parallelism (arXiv:2309.14509): several ranks compute one trie together.

Each rank of a group has a run of the trie's nodes. Around attention the ranks exchange, so that
each attends over all nodes with a share of the heads; the exchange is DeepSpeed's. All ranks of a
group get the same micro-batch, the same scores and so the same loss, and each takes the gradient
through its own nodes: the sum over ranks, which ZeRO takes anyway, is the gradient of the loss.

Shapes: T nodes, N questions to the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedModel

from agentrl.errors import UsageError
from agentrl.train.distributed import RankGroup
from agentrl.train.microbatch import TokenLayout
from agentrl.train.scorer import TokenScores
from agentrl.train.tree_attention import TreePlan, attend_over_tree
from agentrl.train.zero import ulysses_attention

__all__ = ["SHARED_TREE_ATTENTION", "SequenceGroup"]

SHARED_TREE_ATTENTION = "agentrl_shared_tree"
"""The name under which transformers knows the attention of a model that is run by a group."""


@dataclass(frozen=True)
class _SharedTree:
    """The plan of the whole tree, with the positions of this rank's nodes."""

    whole: TreePlan
    positions_1T: Tensor


class SequenceGroup:
    """The ranks that compute one trie together: consecutive ones, `size` of them."""

    def __init__(self, ranks: RankGroup, size: int, policy: PreTrainedModel) -> None:
        """Connect the groups, and make the attention that models of the policy's shape use.

        A collective of all ranks.

        Raises:
            UsageError: the ranks, or the heads of the model, cannot be shared by so many.
        """
        if ranks.world_size % size:
            raise UsageError(
                f"train.sequence_parallel_size is {size}, but there are {ranks.world_size} ranks: "
                "start a multiple of it with torchrun --nproc-per-node."
            )
        groups = [
            dist.new_group(list(range(start, start + size)))
            for start in range(0, ranks.world_size, size)
        ]
        self.size, self._rank = size, ranks.rank % size
        self._group = groups[ranks.rank // size]
        AttentionInterface.register(SHARED_TREE_ATTENTION, self._attention(policy.config))

    def run(
        self, forward: Callable[[TokenLayout], TokenScores], layout: TokenLayout
    ) -> TokenScores:
        """Scores [N] of all questions of a trie, of which `forward` computes this rank's part."""
        part, mine_N = self._part(layout)
        scores = forward(part)

        def whole(part_N: Tensor) -> Tensor:
            gathered: Tensor = _Gathered.apply(part_N, mine_N, self._group)  # type: ignore[no-untyped-call]
            return gathered

        values_N = None if scores.values_N is None else whole(scores.values_N)
        return TokenScores(whole(scores.logprobs_N), whole(scores.entropy_N), values_N)

    def _part(self, layout: TokenLayout) -> tuple[TokenLayout, Tensor]:
        """This rank's nodes, and which questions are to them [N] (bool)."""
        assert layout.tree is not None, "LearnerWorker refuses models that run on rows"
        width = -(-layout.input_ids_BT.shape[1] // self.size)
        start = self._rank * width
        mine_N = (layout.index_N >= start) & (layout.index_N < start + width)
        temperatures_N = layout.temperatures_N
        # It goes through the model as the plan of a tree does; `_attend_whole` takes it apart.
        tree: Any = _SharedTree(layout.tree, self._cut(layout.tree.positions_1T, width))
        part = replace(
            layout,
            input_ids_BT=self._cut(layout.input_ids_BT, width),
            index_N=layout.index_N[mine_N] - start,
            targets_N=layout.targets_N[mine_N],
            temperatures_N=None if temperatures_N is None else temperatures_N[mine_N],
            tree=tree,
        )
        return part, mine_N

    def _cut(self, x_1T: Tensor, width: int) -> Tensor:
        padded = pad(x_1T, (0, width * self.size - x_1T.shape[1]))
        return padded[:, self._rank * width : (self._rank + 1) * width].contiguous()

    def _attention(self, config: Any) -> Callable[..., tuple[Tensor, None]]:
        text = config.get_text_config()
        heads = text.num_attention_heads
        try:
            return ulysses_attention(
                attn=_attend_whole,
                batch_size=1,
                attn_head_count=heads,
                attn_head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
                kv_head_count=text.num_key_value_heads,
                num_hidden_layers=text.num_hidden_layers,
                process_group=self._group,
                seq_length_is_variable=True,
            )
        except ValueError as error:
            raise UsageError(
                f"train.sequence_parallel_size {self.size} does not divide the model's heads "
                f"({error}): lower it."
            ) from error


def _attend_whole(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    agentrl_tree: _SharedTree,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend over all nodes with some heads; what was padded to make the parts equal is cut off."""
    size, padded = agentrl_tree.whole.positions_1T.shape[1], query.shape[2]
    out, _ = attend_over_tree(
        module,
        query[:, :, :size],
        key[:, :, :size],
        value[:, :, :size],
        attention_mask,
        agentrl_tree=agentrl_tree.whole,
        **kwargs,
    )
    return pad(out, (0, 0, 0, 0, 0, padded - size)), None


class _Gathered(torch.autograd.Function):
    """Puts the parts of all ranks together; the gradient of each part goes where it came from."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, mine_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(mine_N)
        whole_N = part.new_zeros(len(mine_N))
        whole_N[mine_N] = part
        dist.all_reduce(whole_N, group=group)
        return whole_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None]:
        (mine_N,) = ctx.saved_tensors
        return grad_N[mine_N], None, None
