"""Forward passes of the embedded engine: prompt tokens into the cache, logits of next tokens.

Legend: B rows, W new tokens per row, V vocabulary. Runs in the engine's worker thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.engines.embedded.attention import AttentionPlan
from agentrl.engines.embedded.families import Families, Family
from agentrl.engines.embedded.kv_cache import KVCache
from agentrl.engines.embedded.prefill import Span
from agentrl.engines.embedded.routes import RouteTable

__all__ = ["ModelRunner"]


class ModelRunner:
    """A model together with the cache of its slots."""

    def __init__(
        self,
        model: PreTrainedModel,
        max_slots: int,
        max_length: int,
        *,
        record_routing: bool = False,
    ) -> None:
        self._model = model
        self.routes = RouteTable(model) if record_routing else None
        self.cache = KVCache(max_slots, max_length)
        self.vocab_size: int = model.get_input_embeddings().num_embeddings

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._model.get_input_embeddings().weight.device  # type: ignore[no-any-return]

    def prefill(self, spans: Sequence[Span], tokens: NDArray[np.int32]) -> int:
        """Compute the keys and values of prompt spans, without any logits.

        `tokens` [S, N] holds the ids of every slot. Spans lie by ascending slot. Returns how many
        tokens were computed, padding not counted.
        """
        slots, starts, ends = np.array(spans, dtype=np.int64).T
        # Padding stays at the row's end, a position that is written before it is ever seen.
        width = np.arange((ends - starts).max())
        positions = np.minimum(starts[:, None] + width, ends[:, None])
        self.cache.reserve(int(slots[-1]) + 1, int(positions.max()) + 1)
        self._forward(self._model.base_model, slots, positions, tokens[slots[:, None], positions])
        return sum(end - start for _, start, end in spans)

    def next_logits(
        self,
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        ids: NDArray[np.int32],
        families: list[Family],
    ) -> Tensor:
        """Logits [B, V] of the token after `ids` [B] at `positions` [B]; slots ascend.

        `families` says which rows to compute together, none if that does not pay.
        """
        self.cache.reserve(int(slots[-1]) + 1, int(positions.max()) + 1)
        decoding = Families(families, slots, positions, self._model.dtype) if families else None
        output = self._forward(self._model, slots, positions[:, None], ids[:, None], decoding)
        return output.logits[:, -1]  # type: ignore[no-any-return]

    def _forward(
        self,
        module: torch.nn.Module,
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
        ids: NDArray[np.int32],
        families: Families | None = None,
    ) -> Any:
        device = self.device
        positions_BW = torch.from_numpy(positions).to(device)
        plan = AttentionPlan(
            cache=self.cache,
            slots=torch.from_numpy(slots).to(device),
            positions=positions_BW,
            visible=int(positions.max()) + 1,
            num_rows=int(slots[-1]) + 1,
            dtype=self._model.dtype,
            families=families,
        )
        output = module(
            input_ids=torch.from_numpy(ids.astype(np.int64)).to(device),
            position_ids=positions_BW,
            use_cache=False,
            agentrl_plan=plan,
        )
        if self.routes is not None:
            self.routes.note(slots, positions)
        return output

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Give one slot what another holds of its first `length` positions."""
        self.cache.copy_prefix(source, target, length)
        if self.routes is not None:
            self.routes.copy_prefix(source, target, length)
