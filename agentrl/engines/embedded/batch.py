"""The running batch: requests join it, get one token per step, and leave it.

Between steps any request may be placed, released or taken out. A step first computes what the
newly placed requests lack (`prefill`), all but the last known token of each; the last one goes
through the common decode pass, whose logits give everybody's next token. So no logits of prompt
tokens are ever computed, and a request whose prefix is cached joins at no cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from agentrl.engines.embedded.families import Family, find_families
from agentrl.engines.embedded.prefill import plan_prefill
from agentrl.engines.embedded.request import Request
from agentrl.engines.embedded.runner import ModelRunner
from agentrl.engines.embedded.sampling import SamplingBatch, sample
from agentrl.engines.embedded.slots import Placement, SlotTable
from agentrl.errors import EngineError

__all__ = ["RunningBatch"]

_COUNTERS = (
    "prompt_tokens",
    "cached_tokens",
    "prefilled_tokens",
    "prefill_steps",
    "sampled_tokens",
    "decode_steps",
)


class RunningBatch:
    """Requests with a slot, and the cache of those that had one."""

    def __init__(
        self,
        model: PreTrainedModel,
        max_num_seqs: int,
        max_model_len: int,
        *,
        record_routing: bool = False,
    ) -> None:
        self.counters = dict.fromkeys(_COUNTERS, 0)
        self._max_num_seqs = max_num_seqs
        self._runner = ModelRunner(
            model, max_num_seqs, max_model_len, record_routing=record_routing
        )
        self._table = SlotTable(max_num_seqs)
        self._running: dict[int, Request] = {}
        self._slots: NDArray[np.int64] | None = None
        self._sampling: SamplingBatch | None = None
        self._families: list[Family] | None = None

    def __len__(self) -> int:
        return len(self._running)

    @property
    def requests(self) -> list[Request]:
        """Those that run, by slot."""
        return [self._running[slot] for slot in sorted(self._running)]

    @property
    def free(self) -> int:
        """How many more requests can be placed."""
        return self._max_num_seqs - len(self._running)

    @property
    def cache_bytes(self) -> int:
        """Bytes that the key/value cache holds."""
        return self._runner.cache.num_bytes

    def step(self, joining: Sequence[Request], version: int) -> list[Request]:
        """Place `joining`, sample one token for every request, and return those that ended.

        Raises:
            EngineError: the model gave logits that are not finite.
        """
        with torch.inference_mode():
            if joining:
                self._prefill(self._place(joining))
            return self._decode(version)

    def remove(self, requests: Iterable[Request]) -> None:
        """Take requests out; what was computed of them stays cached."""
        gone = set(requests)
        for slot in [slot for slot, request in self._running.items() if request in gone]:
            if self._runner.routes is not None:
                length = int(self._table.length[slot])
                self._running[slot].routed_experts = self._runner.routes.of(slot, length)
            del self._running[slot]
            self._table.release(slot)
            self._membership_changed()

    def clear(self) -> list[Request]:
        """Forget every cached prefix; returns the requests that ran, which must be placed again."""
        requests = self.requests
        self._running.clear()
        self._membership_changed()
        self._table.clear()
        self._runner.cache.clear()
        return requests

    def _place(self, joining: Sequence[Request]) -> list[Placement]:
        self._table.begin_round()
        placements = []
        for request in joining:
            placed = self._table.place(request.known_tokens())
            self._running[placed.slot] = request
            if request.cached_tokens is None:
                request.cached_tokens = placed.cached
                self.counters["prompt_tokens"] += len(request.prompt)
                self.counters["cached_tokens"] += placed.cached
            placements.append(placed)
        self._membership_changed()
        return placements

    def _prefill(self, placements: Sequence[Placement]) -> None:
        """Copy shared prefixes and compute the rest, wave by wave."""
        table, runner = self._table, self._runner
        longest = int(max(table.length[placed.slot] for placed in placements))
        runner.cache.reserve(max(placed.slot for placed in placements) + 1, longest + 1)
        for wave in range(max(placed.wave for placed in placements) + 1):
            members = [placed for placed in placements if placed.wave == wave]
            for placed in members:
                if placed.source is not None:
                    runner.copy_prefix(placed.source, placed.slot, placed.cached)
            spans = [(p.slot, p.cached, int(table.length[p.slot])) for p in members]
            for group in plan_prefill(spans):
                self.counters["prefilled_tokens"] += runner.prefill(group, table.tokens)
                self.counters["prefill_steps"] += 1

    def _decode(self, version: int) -> list[Request]:
        requests = self.requests
        if self._slots is None or self._sampling is None:
            self._slots = np.array(sorted(self._running))
            self._sampling = SamplingBatch.of(
                [request.params for request in requests],
                [request.seed for request in requests],
                self._runner.vocab_size,
                self._runner.device,
            )
        table, slots = self._table, self._slots
        positions = table.length[slots]
        table.reserve(int(positions.max()) + 2)
        if self._families is None:
            # A GPU reads faster than the calls of families begin.
            on_cpu = self._runner.device.type == "cpu"
            self._families = find_families(table.tokens[slots], positions) if on_cpu else []
        logits = self._runner.next_logits(
            slots, positions, table.tokens[slots, positions], self._families
        )
        counts = np.array([len(request.token_ids) for request in requests], dtype=np.uint64)
        tokens, logprobs = sample(logits, self._sampling, counts, _forbidden(requests))
        if not np.isfinite(logprobs).all():
            raise EngineError(
                "the model gave logits that are not finite: its weights are broken "
                "(a learning rate that is too high?) or overflow their dtype"
            )
        table.tokens[slots, positions + 1] = tokens
        table.length[slots] += 1
        self.counters["decode_steps"] += 1
        self.counters["sampled_tokens"] += len(slots)
        ended = [
            request
            for request, token, logprob in zip(
                requests, tokens.tolist(), logprobs.tolist(), strict=True
            )
            if request.append(token, logprob, version)
        ]
        if ended:
            self.remove(ended)
        return ended

    def _membership_changed(self) -> None:
        self._slots = None
        self._sampling = None
        self._families = None


def _forbidden(requests: Sequence[Request]) -> tuple[list[int], list[int]] | None:
    """(rows, token ids) of stop tokens that `min_new_tokens` does not allow yet."""
    pairs = [
        (row, token)
        for row, request in enumerate(requests)
        if len(request.token_ids) < request.params.min_new_tokens
        for token in request.params.stop_token_ids
    ]
    return ([row for row, _ in pairs], [token for _, token in pairs]) if pairs else None
