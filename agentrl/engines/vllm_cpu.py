"""Runs inside vLLM's processes on a CPU: what they do there that does not suit training.

It is copied beside `vllm_plugin.py`, and may import vLLM alone.
"""

# mypy: ignore-errors
# vLLM is not installed where types are checked.

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from vllm.distributed.device_communicators import shm_broadcast
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

__all__ = ["have_tied_heads_follow", "wait_without_spinning"]

WAIT_MS = 2
"""How long a process sleeps at most before it looks for a message again."""


def wait_without_spinning() -> None:
    """Let processes that wait for each other sleep.

    After each message they look for the next one for a second without a pause. On a CPU that takes
    the cores from whoever computes, the learner included. They sleep until they are called, but for
    a moment only: vLLM loses calls, which its looking makes up for.
    """
    condition = getattr(shm_broadcast, "SpinCondition", None)
    if condition is None or condition.__init__.__defaults__ is None:
        return
    condition.__init__.__defaults__ = (0.0,)  # busy_loop_s
    wait = condition.wait

    def wait_a_moment(self: Any, timeout_ms: int | None = None) -> None:
        wait(self, WAIT_MS if timeout_ms is None else min(timeout_ms, WAIT_MS))

    condition.wait = wait_a_moment


def have_tied_heads_follow() -> None:
    """Have a head that is the embedding compute with the embedding's packed weights.

    Both layers have the weight packed when it is loaded first. A later load packs it for the
    embedding alone, since no weight comes under the head's name: it would compute with the first
    weights for ever.
    """
    method = UnquantizedEmbeddingMethod
    tie, process = method.tie_weights, method.process_weights_after_loading
    embedding_of: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def tie_weights(self: Any, layer: Any, embed_tokens: Any) -> Any:
        embedding_of[layer] = embed_tokens
        return tie(self, layer, embed_tokens)

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        embedding = embedding_of.get(layer)
        if embedding is None:
            process(self, layer)
            return
        layer.cpu_linear = lambda x, weight, bias: embedding.cpu_linear(x, weight, bias)

    method.tie_weights = tie_weights
    method.process_weights_after_loading = process_weights_after_loading
