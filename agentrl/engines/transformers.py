"""The embedded engine: continuous batching on a transformers model inside this process.

All bookkeeping happens on the event loop, between steps; a step (prefill of those who join, one
token for everybody) runs in the engine's only worker thread and holds the lock. Pausing, new
weights and flushing take the same lock, so that they always lie between two steps.

With `deterministic`, batches do not depend on how fast callers are: a step begins only when every
participant has a request here, and waiting requests are placed by rollout id. Then the same
history gives the same batches and, on a CPU, the same bits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from agentrl.engines.base import Engine, PauseMode, WeightSource
from agentrl.engines.embedded.attention import ATTENTION_NAME
from agentrl.engines.embedded.batch import RunningBatch
from agentrl.engines.embedded.gate import ParticipantGate
from agentrl.engines.embedded.limits import check_supported
from agentrl.engines.embedded.request import Request
from agentrl.engines.embedded.weights import commit, device_of, has_weights, skeleton, stage
from agentrl.engines.engine_stats import EngineStats
from agentrl.errors import ContextOverflowError, EngineError
from agentrl.types import Generation, SamplingParams

__all__ = ["TransformersEngine", "skeleton"]

T = TypeVar("T")

_COUNTERS = ("weight_updates", "straggler_timeouts")


class TransformersEngine(Engine):
    """Samples from a transformers causal language model, on the device where its weights are.

    What is sampled, and what the log-probabilities are, is said in `embedded.sampling`. An update
    is all or nothing: one that fails leaves the old weights in use. Requests in flight go on under
    new weights, their caches computed again; `Generation.weight_versions` says where they changed.
    A forward pass that fails ends the requests in it and drops the cache; later ones still work.

    Args:
        model: a module of the engine's own (see `skeleton`): its attention is replaced, and an
            update replaces its parameters. If it has weights, they are version 0.
        max_num_seqs: how many requests are sampled at once; also the number of cached prefixes.
        max_model_len: most tokens of one request, prompt and response together.
        deterministic: wait for every participant before a step.
        straggler_timeout: seconds to wait for participants. Once it has passed, steps no longer
            wait, and batches depend on timing, until the next weight version.
        record_routing: tell which experts each token went to.

    Raises:
        EngineError: the model is of a kind that the engine would run wrongly.
        UsageError: `record_routing` of a model without experts.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_num_seqs: int,
        max_model_len: int,
        deterministic: bool = True,
        straggler_timeout: float = 2.0,
        record_routing: bool = False,
    ) -> None:
        check_supported(model, max_model_len)
        model.config._attn_implementation = ATTENTION_NAME
        self._model = model.eval().requires_grad_(False)
        self._has_weights = has_weights(model)
        self._device = device_of(model)
        self._vocab_size: int = model.get_input_embeddings().num_embeddings
        self._max_model_len = max_model_len
        self._version = 0
        self._batch = RunningBatch(
            model, max_num_seqs, max_model_len, record_routing=record_routing
        )
        self._gate = ParticipantGate(deterministic, straggler_timeout)
        self._waiting: list[Request] = []
        self._open: set[Request] = set()
        """Every request that somebody awaits."""
        self._arrivals = 0
        self._paused: PauseMode | None = None
        self._closed = False
        self._requests = EngineStats()
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._reported = self._counters | self._batch.counters
        self._changed = asyncio.Event()
        """Something happened that may allow a step."""
        self._between_steps = asyncio.Condition()
        """Held during a step; notified after each."""
        self._server: asyncio.Task[None] | None = None
        self._worker = ThreadPoolExecutor(1, "agentrl-engine", initializer=self._enter_worker)

    @property
    def weight_version(self) -> int:
        """The policy version that the next token is sampled from."""
        return self._version

    @property
    def max_model_len(self) -> int:
        """The most tokens, prompt and response together, that one request may hold."""
        return self._max_model_len

    async def start(self) -> None:
        """Begin to serve requests."""
        self._server = asyncio.create_task(self._serve(), name="agentrl-engine")
        self._server.add_done_callback(self._served)

    async def generate(
        self,
        token_ids: SequenceABC[int],
        params: SamplingParams,
        *,
        rollout_id: str = "",
        group_id: str = "",
    ) -> Generation:
        """Sample a continuation of `token_ids`; see `Engine.generate`."""
        prompt = self._checked(token_ids, params)
        if not self._waiting and not len(self._batch):
            self._gate.restart(_now())
        self._arrivals += 1
        future: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        request = Request(prompt, params, future, rollout_id, self._arrivals)
        self._waiting.append(request)
        self._open.add(request)
        self._changed.set()
        with self._requests.request() as elapsed:
            began = time.monotonic()
            try:
                generation = await future
            except asyncio.CancelledError:
                self._requests.record_unanswered("cancelled")
                raise
            except EngineError:
                self._requests.record_unanswered("failed")
                raise
            finally:
                self._open.discard(request)
                # A cancelled call frees its slot.
                self._changed.set()
            first = request.first_token_at
            to_first = None if first is None else first - began
            self._requests.record(len(prompt), generation, elapsed(), to_first)
        return generation

    @contextmanager
    def participant(self) -> Iterator[None]:
        """Announce one caller that every step waits for; see `Engine.participant`."""
        try:
            with self._gate.participant():
                yield
        finally:
            self._changed.set()

    async def pause(self, mode: PauseMode = "wait") -> None:
        """Stop sampling; returns when no step runs and requests are treated as `mode` says.

        Requests that have no slot yet, and those that come later, wait for `resume`; `abort` ends
        those without a slot too, with no tokens.
        """
        async with self._between_steps:
            self._paused = mode
            if mode == "abort":
                self._abort()
            self._changed.set()
            await self._between_steps.wait_for(
                lambda: self._paused != "wait" or not len(self._batch) or self._closed
            )

    async def resume(self) -> None:
        """Go on sampling."""
        async with self._between_steps:
            self._paused = None
            self._changed.set()
            self._between_steps.notify_all()

    async def update_weights(self, source: WeightSource) -> None:
        """Replace the weights between two steps; see `Engine.update_weights`.

        Raises:
            EngineError: names or shapes do not fit the model. The old weights stay in use.
        """
        async with self._between_steps:
            self._refuse_if_closed()
            staged = await self._in_worker(lambda: stage(self._model, source, self._device))
            commit(self._model, staged)
            self._has_weights = True
            self._version = source.version
            self._counters["weight_updates"] += 1
            self._gate.close_again()
            self._requeue()

    async def flush_cache(self) -> None:
        """Forget every cached prefix; requests in flight compute theirs again."""
        async with self._between_steps:
            self._requeue()

    def stats(self) -> Mapping[str, float]:
        """Metrics since the last call, and what the engine holds now.

        Beside those of `EngineStats`: prompt_tokens, cached_tokens (of them), prefilled_tokens,
        prefill_steps, sampled_tokens, decode_steps (counted at each step), weight_updates,
        straggler_timeouts. `mean_batch_size` is requests per decode step. Now: running_requests,
        waiting_requests, cache_bytes.
        """
        total = self._counters | self._batch.counters
        delta = {name: float(count - self._reported[name]) for name, count in total.items()}
        self._reported = total
        steps = delta["decode_steps"]
        return {
            **self._requests.take().metrics(),
            **delta,
            "mean_batch_size": delta["sampled_tokens"] / steps if steps else 0.0,
            "running_requests": float(len(self._batch)),
            "waiting_requests": float(len(self._waiting)),
            "cache_bytes": float(self._batch.cache_bytes),
        }

    async def close(self) -> None:
        """End the engine: what is pending fails, the cache is freed, the worker thread ends."""
        self._closed = True
        self._changed.set()
        async with self._between_steps:
            self._between_steps.notify_all()
        if self._server is not None:
            await asyncio.wait([self._server])
        self._fail(self._open, EngineError("the engine was closed"))
        self._waiting.clear()
        self._batch.clear()
        self._worker.shutdown()

    async def _serve(self) -> None:
        """Take step after step while there is something to do."""
        while not self._closed:
            if not (self._can_step() or self._cancelled()):
                await self._next_change()
                continue
            async with self._between_steps:
                self._drop_cancelled()
                if self._can_step() and not self._closed:
                    await self._step()
                self._between_steps.notify_all()

    def _can_step(self) -> bool:
        running = len(self._batch)
        if self._paused is not None:
            # A pause that waits lets the running requests finish, and starts no others.
            return self._paused == "wait" and running > 0
        return (running > 0 or bool(self._waiting)) and not self._gate.holds(self._present())

    async def _next_change(self) -> None:
        """Sleep until a request, a participant or a command changes something."""
        self._changed.clear()
        has_work = self._paused is None and (len(self._batch) > 0 or bool(self._waiting))
        patience = self._gate.patience_left(_now()) if has_work else None
        try:
            async with asyncio.timeout(patience):
                await self._changed.wait()
        except TimeoutError:
            self._counters["straggler_timeouts"] += 1
            self._gate.give_up()

    async def _step(self) -> None:
        """Let waiting requests join, sample one token for each, and deliver what ended."""
        joining: list[Request] = []
        if self._paused is None and self._waiting and self._batch.free:
            self._waiting.sort(key=lambda request: request.order)
            joining = self._waiting[: self._batch.free]
            del self._waiting[: len(joining)]
        version = self._version
        step = self._in_worker(lambda: self._batch.step(joining, version))
        await asyncio.wait([step])
        error = step.exception()
        if error is None:
            ended = step.result()
            for request in ended:
                request.finish()
        else:
            self._fail({*joining, *self._batch.clear()}, error)
        self._gate.restart(_now())

    def _in_worker(self, function: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._worker, function)

    def _enter_worker(self) -> None:
        """The current CUDA device belongs to a thread: collectives in this one need it set."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _present(self) -> int:
        """How many callers have a request here."""
        return len({request.caller for request in (*self._waiting, *self._batch.requests)})

    def _cancelled(self) -> list[Request]:
        return [r for r in (*self._waiting, *self._batch.requests) if r.future.done()]

    def _drop_cancelled(self) -> None:
        gone = self._cancelled()
        if gone:
            self._batch.remove(gone)
            self._waiting = [request for request in self._waiting if not request.future.done()]

    def _requeue(self) -> None:
        """Drop the cache; what ran is placed again, before everything that waits."""
        self._waiting = [*self._batch.clear(), *self._waiting]
        self._changed.set()

    def _abort(self) -> None:
        """End everything with the tokens so far."""
        requests = [*self._batch.requests, *self._waiting]
        self._batch.remove(requests)
        self._waiting.clear()
        for request in requests:
            request.finish("abort")

    def _fail(self, requests: set[Request], error: BaseException) -> None:
        for request in requests:
            failure = EngineError(
                str(error)
                if isinstance(error, EngineError)
                else (
                    f"a forward pass of the embedded engine failed: {type(error).__name__}: {error}"
                )
            )
            failure.__cause__ = error
            request.fail(failure)

    def _served(self, server: asyncio.Task[None]) -> None:
        """If serving broke, nobody may wait for ever."""
        error = None if server.cancelled() else server.exception()
        if error is not None:
            self._closed = True
            self._fail(self._open, error)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed: build another one")

    def _checked(self, token_ids: SequenceABC[int], params: SamplingParams) -> NDArray[np.int32]:
        """The prompt as an array, if the engine can sample it as asked."""
        self._refuse_if_closed()
        if self._server is None:
            raise EngineError("the engine is not started: await start() before generate()")
        if not self._has_weights:
            raise EngineError("the engine has no weights yet: await update_weights() first")
        prompt = np.asarray(token_ids, dtype=np.int64)
        if prompt.ndim != 1 or len(prompt) == 0:
            raise EngineError("the prompt has no tokens: give at least one")
        total = len(prompt) + params.max_new_tokens
        if total > self._max_model_len:
            raise ContextOverflowError(
                f"prompt ({len(prompt)} tokens) and max_new_tokens ({params.max_new_tokens}) are "
                f"{total} tokens, more than max_model_len ({self._max_model_len}): shorten the "
                "prompt or raise engine.max_model_len"
            )
        stops = np.array(params.stop_token_ids, dtype=np.int64)
        for what, ids in (("prompt", prompt), ("stop_token_ids", stops)):
            outside = ids[(ids < 0) | (ids >= self._vocab_size)]
            if len(outside):
                raise EngineError(
                    f"{what} has id {outside[0]}, outside the model's vocabulary of "
                    f"{self._vocab_size}: use the tokenizer that belongs to the model"
                )
        return prompt.astype(np.int32)


def _now() -> float:
    return asyncio.get_running_loop().time()
