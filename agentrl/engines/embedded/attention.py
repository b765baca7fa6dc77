"""Attention of new tokens over cached slots, as an attention implementation of transformers.

Legend: B rows of the forward pass, W new tokens per row, S slots, L visible positions,
G query heads per key/value head, H key/value heads, D head size.

The model is not told of any cache: it hands this function its new queries, keys and values, and
an `AttentionPlan` that travels through its keyword arguments says where they belong. Models that
declare `_supports_attention_backend` pass such arguments on; it is how other serving engines run
them too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from agentrl.engines.embedded.families import Families, attend_in_families
from agentrl.engines.embedded.kv_cache import KVCache, flat_positions
from agentrl.errors import EngineError

__all__ = ["ATTENTION_NAME", "AttentionPlan"]

ATTENTION_NAME = "agentrl_slots"

_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


@dataclass(slots=True)
class AttentionPlan:
    """Where the tokens of one forward pass lie.

    slots [B] and positions [B, W] are int64 on the model's device; `visible` is L, one more than
    the largest position; `num_rows` is one more than the largest slot. Positions of padding
    tokens lie beyond the row's valid length, where anything may be written.
    """

    cache: KVCache
    slots: Tensor
    positions: Tensor
    visible: int
    num_rows: int
    dtype: torch.dtype
    families: Families | None = None
    """Set where one new token for each row is computed and reading shared prefixes once pays."""
    _masks: dict[int | None, Tensor] = field(default_factory=dict)
    _writes: dict[int, Tensor] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """True where the rows are exactly the slots 0 .. num_rows - 1: no copy is needed."""
        return len(self.slots) == self.num_rows

    @property
    def spread(self) -> bool:
        """True where attending over every slot costs less than gathering the rows' keys."""
        return not self.whole and self.positions.shape[1] == 1 and self.fills_half

    @property
    def fills_half(self) -> bool:
        """True where at least half of the slots up to the last one are rows."""
        return 2 * len(self.slots) >= self.num_rows

    def write_index(self, heads: int) -> Tensor:
        """Where new keys go in a cache seen as [S * H * L, D]; the same for equal layers."""
        if heads not in self._writes:
            self._writes[heads] = flat_positions(
                self.slots, self.positions, heads, self.cache.length
            )
        return self._writes[heads]

    def mask(self, window: int | None) -> Tensor:
        """Additive mask [B, 1, W, L]: position k is seen from q if q - window < k <= q."""
        if window not in self._masks:
            key = torch.arange(self.visible, device=self.slots.device)
            query = self.positions[:, None, :, None]
            seen = key <= query
            if window is not None:
                seen &= key > query - window
            mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.slots.device)
            mask.masked_fill_(~seen, float("-inf"))
            if self.spread:
                # Idle slots must see something, or their softmax is NaN; the result is dropped.
                every = mask.new_zeros((self.num_rows, *mask.shape[1:]))
                mask = every.index_copy_(0, self.slots, mask)
            self._masks[window] = mask
        return self._masks[window]


def _slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    agentrl_plan: AttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Write the new keys and values, then attend: query [B, G*H, W, D], key, value [B, H, W, D]."""
    if agentrl_plan is None:
        raise EngineError(
            "this model belongs to an embedded engine: give the engine a model of its own"
        )
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise EngineError(f"the embedded engine cannot do attention with {name}")
    plan = agentrl_plan
    rows, query_heads, width, size = query.shape
    heads = key.shape[1]
    keys, values = plan.cache.layer(module.layer_idx, key, value)  # type: ignore[arg-type]
    index = plan.write_index(heads)
    keys.view(-1, size).index_copy_(0, index, key.reshape(-1, size))
    values.view(-1, value.shape[-1]).index_copy_(0, index, value.reshape(-1, value.shape[-1]))

    # Query heads that share a key/value head become rows of one query block, so that keys are
    # not repeated: [B, G*H, W, D] -> [B, H, G*W, D].
    groups = query_heads // heads
    block = query.reshape(rows, heads, groups * width, size)
    if plan.families is not None and sliding_window is None and value.shape[-1] == size:
        scale = size**-0.5 if scaling is None else scaling
        out = attend_in_families(block, keys, values, plan.families, scale)
        return out.reshape(rows, query_heads, width, size).transpose(1, 2).contiguous(), None
    mask = plan.mask(sliding_window)
    if groups > 1 and width > 1:
        mask = mask.repeat(1, 1, groups, 1)
    out = _attend(plan, block, keys, values, mask, scaling)
    out = out.reshape(rows, query_heads, width, value.shape[-1])
    return out.transpose(1, 2).contiguous(), None


def _attend(
    plan: AttentionPlan,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scaling: float | None,
) -> Tensor:
    """Attention of query [B, H, Q, D] over the first L positions of the rows' slots."""
    keys, values = keys[:, :, : plan.visible], values[:, :, : plan.visible]
    if plan.whole or plan.spread:
        keys, values = keys[: plan.num_rows], values[: plan.num_rows]
    else:
        keys, values = keys.index_select(0, plan.slots), values.index_select(0, plan.slots)
    if plan.spread:
        every = query.new_zeros((plan.num_rows, *query.shape[1:]))
        query = every.index_copy_(0, plan.slots, query)
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)
    return out.index_select(0, plan.slots) if plan.spread else out


AttentionInterface.register(ATTENTION_NAME, _slot_attention)
