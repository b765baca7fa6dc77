"""What a rollout engine is: tokens in, tokens out, weights that can be replaced.

The protocol knows nothing of HTTP, processes or devices. An engine samples exactly as
`SamplingParams` says or refuses the request before it runs; it never drops a setting silently.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from agentrl.types import Generation, SamplingParams

if TYPE_CHECKING:
    import torch

__all__ = ["Engine", "PauseMode", "WeightSource"]

PauseMode = Literal["abort", "wait", "keep"]
"""What a pause does with requests in flight: end them with their tokens so far, let them finish,
or hold them, to go on after `resume`."""


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where new weights come from.

    `named_weights()` yields (name, tensor) in the names of the Hugging Face state dict, tied
    weights once. It is a collective: every learner rank iterates it to its end. With `live`, the
    tensors are the learner's own and stay valid until the next version, so that an engine in the
    same process may use them without a copy; otherwise each is valid until the next is drawn.

    Of a LoRA run the weights are merged. `save_adapter(folder)` writes the factors alone into an
    empty folder, as `adapter_config.json` and `adapter_model.safetensors`; a collective too. None
    where there is no adapter.
    """

    named_weights: Callable[[], Iterator[tuple[str, torch.Tensor]]]
    version: int
    live: bool = False
    save_adapter: Callable[[Path], None] | None = None


class Engine(ABC):
    """A rollout engine. All methods are called from one asyncio event loop."""

    @property
    @abstractmethod
    def weight_version(self) -> int:
        """The policy version that the next token is sampled from."""

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """The most tokens, prompt and response together, that one request may hold."""

    @property
    def repeats(self) -> bool:
        """True where the seed of a call decides what it samples, whatever is sampled beside it.

        Elsewhere no seeds are derived: they would cost time and repeat nothing.
        """
        return True

    async def start(self) -> None:
        """Make the engine ready for `generate`. Called once."""

    @abstractmethod
    async def generate(
        self,
        token_ids: SequenceABC[int],
        params: SamplingParams,
        *,
        rollout_id: str = "",
        group_id: str = "",
    ) -> Generation:
        """Sample a continuation of `token_ids`.

        `rollout_id` and `group_id` say whose cached prefix to look for; they never change what is
        sampled. Cancelling the call frees the request.

        Raises:
            ContextOverflowError: prompt and `max_new_tokens` do not fit `max_model_len`.
            EngineError: the engine failed, or cannot sample as `params` asks.
        """

    def participant(self) -> AbstractContextManager[None]:
        """Announce one caller that will keep calling `generate` until the context ends.

        An engine whose batches must not depend on timing waits until every participant has a
        request with it; others ignore this.
        """
        return nullcontext()

    async def pause(self, mode: PauseMode = "wait") -> None:
        """Stop sampling; requests in flight are treated as `mode` says."""

    async def resume(self) -> None:
        """Go on sampling after `pause`."""

    @abstractmethod
    async def update_weights(self, source: WeightSource) -> None:
        """Replace the weights, drop every cached prefix, then report `source.version`."""

    async def weights_will_change(self) -> None:
        """Draw no longer from the last `WeightSource`: the learner's tensors change from now on."""

    async def flush_cache(self) -> None:
        """Forget every cached prefix."""

    async def sleep(self, level: int = 1) -> None:
        """Give device memory back: level 1 keeps the weights on the host, 2 drops them."""

    async def wake(self, tags: SequenceABC[str] = ("weights", "kv_cache")) -> None:
        """Take device memory again, weights before cache."""

    async def refresh_stats(self) -> None:
        """Bring what `stats` tells up to date, where that takes a question to a server."""

    def stats(self) -> Mapping[str, float]:
        """Metrics since the last call: prompt_tokens, cached_tokens, sampled_tokens, ..."""
        return {}

    async def close(self) -> None:
        """End the engine and free what it holds. Safe to call twice."""
