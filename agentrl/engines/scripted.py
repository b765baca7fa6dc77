"""An engine that says what it is told: for tests, `agentrl check` and debugging an agent.

It has no model, so it obeys what a real engine would enforce (`max_new_tokens`, stop ids,
`min_new_tokens`, the context length, pauses, versions) and nothing that needs a distribution.
Nothing here imports torch.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np

from agentrl.engines.base import Engine, PauseMode, WeightSource
from agentrl.errors import ContextOverflowError, EngineError, UsageError
from agentrl.types import FinishReason, Generation, SamplingParams

__all__ = ["Script", "ScriptedCall", "ScriptedEngine", "Tokenizer"]

Script: TypeAlias = Callable[[SequenceABC[int], SamplingParams, str], SequenceABC[int]]
"""(prompt ids, params, rollout_id) -> the ids to say; an exception it raises is the engine's."""


class Tokenizer(Protocol):
    """What a text script needs of a tokenizer."""

    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Text to ids."""


@dataclass(frozen=True, slots=True)
class ScriptedCall:
    """One recorded call of `generate`."""

    token_ids: tuple[int, ...]
    params: SamplingParams
    rollout_id: str
    group_id: str


class ScriptedEngine(Engine):
    """Says the script's ids, cut as a real engine would cut them.

    A list of responses is said in turn by each rollout, from the first again after the last.

    Args:
        script: a list of responses (token ids), or a function that makes them.
        max_model_len: most tokens of prompt and response together.
        latency: seconds that every call takes, or a function from the rollout_id to them.
        failures: indices of the calls (0 is the first of all) that raise `EngineError`.
        logprob: reported for every sampled token.
        record: keep every call in `calls`.

    Attributes:
        calls: every call in order of arrival, if `record`.
        participants: callers announced now.
        max_in_flight: most calls that were ever in progress at once.
    """

    def __init__(
        self,
        script: Script | SequenceABC[SequenceABC[int]],
        *,
        max_model_len: int = 1 << 20,
        latency: float | Callable[[str], float] = 0.0,
        failures: Collection[int] = (),
        logprob: float = -0.5,
        record: bool = True,
    ) -> None:
        self._script = script if callable(script) else _InTurn(script)
        self._max_model_len = max_model_len
        self._latency = latency
        self._failures = frozenset(failures)
        self._logprob = logprob
        self._record = record
        self._version = 0
        self._num_calls = 0
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._unpaused = asyncio.Event()
        self._unpaused.set()
        self._hold = False
        self._num_aborts = 0
        self._closed = False
        self._counters: Counter[str] = Counter()
        self.calls: list[ScriptedCall] = []
        self.participants = 0
        self.max_in_flight = 0

    @classmethod
    def from_file(
        cls, path: Path, tokenizer: Tokenizer, *, max_model_len: int = 1 << 20
    ) -> ScriptedEngine:
        r"""An engine that says the lines of a text file, an end-of-turn token after each.

        Within a line `\n` stands for a line break. Blank lines are left out.

        Raises:
            UsageError: the file cannot be read or holds no response.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"cannot read the script {path}: {error}; set engine.script to a text file "
                "with one response a line"
            ) from error
        end = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        responses = [
            (*tokenizer.encode(line.replace("\\n", "\n"), add_special_tokens=False), *end)
            for line in text.splitlines()
            if line.strip()
        ]
        if not responses:
            raise UsageError(f"the script {path} is empty: write one response a line")
        return cls(responses, max_model_len=max_model_len)

    @property
    def weight_version(self) -> int:
        """The version of the last `update_weights`."""
        return self._version

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and response together."""
        return self._max_model_len

    @contextmanager
    def participant(self) -> Iterator[None]:
        """Count one caller."""
        self.participants += 1
        try:
            yield
        finally:
            self.participants -= 1

    async def generate(
        self,
        token_ids: SequenceABC[int],
        params: SamplingParams,
        *,
        rollout_id: str = "",
        group_id: str = "",
    ) -> Generation:
        """Say the next response of the script."""
        index = self._num_calls
        self._num_calls += 1
        if self._record:
            self.calls.append(ScriptedCall(tuple(token_ids), params, rollout_id, group_id))
        self._check(index, len(token_ids), params)
        while not self._unpaused.is_set():
            await self._unpaused.wait()
        self._enter()
        try:
            aborts = self._num_aborts
            latency = self._latency(rollout_id) if callable(self._latency) else self._latency
            if latency > 0:
                await asyncio.sleep(latency)
            while self._hold and aborts == self._num_aborts:
                await self._unpaused.wait()
            if aborts != self._num_aborts:
                return self._generation((), "abort", params)
            said = self._script(token_ids, params, rollout_id)
        finally:
            self._leave()
        self._counters["prompt_tokens"] += len(token_ids)
        return self._generation(*_cut(said, params), params)

    async def pause(self, mode: PauseMode = "wait") -> None:
        """Hold new calls; calls in flight finish, are held, or end without a token."""
        self._hold = mode == "keep"
        if mode == "abort":
            self._num_aborts += 1
        # An earlier pause may hold calls that this one lets go: wake them to look again.
        self._unpaused.set()
        self._unpaused.clear()
        if mode != "keep":
            await self._idle.wait()

    async def resume(self) -> None:
        """Take calls again."""
        self._hold = False
        self._unpaused.set()

    async def update_weights(self, source: WeightSource) -> None:
        """Take the version; the weights are drawn, as the collective needs, and dropped."""
        for _ in source.named_weights():
            pass
        self._version = source.version

    def stats(self) -> Mapping[str, float]:
        """Prompt and sampled tokens since the last call."""
        counters = {
            name: float(self._counters[name]) for name in ("prompt_tokens", "sampled_tokens")
        }
        self._counters.clear()
        return counters

    async def close(self) -> None:
        """Refuse every later call."""
        self._closed = True

    def _check(self, index: int, prompt_tokens: int, params: SamplingParams) -> None:
        if self._closed:
            raise EngineError("the scripted engine is closed: it takes no more calls")
        if index in self._failures:
            raise EngineError(f"call {index} fails, as the script says")
        if prompt_tokens + params.max_new_tokens > self._max_model_len:
            raise ContextOverflowError(
                f"{prompt_tokens} prompt tokens and {params.max_new_tokens} new ones exceed the "
                f"engine's context of {self._max_model_len}: count before you call"
            )

    def _enter(self) -> None:
        self._in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self._in_flight)
        self._idle.clear()

    def _leave(self) -> None:
        self._in_flight -= 1
        if self._in_flight == 0:
            self._idle.set()

    def _generation(
        self, token_ids: SequenceABC[int], finish_reason: FinishReason, params: SamplingParams
    ) -> Generation:
        length = len(token_ids)
        self._counters["sampled_tokens"] += length
        return Generation(
            token_ids=np.asarray(token_ids, dtype=np.int32),
            logprobs=np.full(length, self._logprob, dtype=np.float32) if params.logprobs else None,
            weight_versions=np.full(length, self._version, dtype=np.int32),
            finish_reason=finish_reason,
        )


class _InTurn:
    """A script from a list: call k of a rollout says response k, modulo their number."""

    def __init__(self, responses: SequenceABC[SequenceABC[int]]) -> None:
        if not responses:
            raise ValueError("a script needs at least one response")
        self._responses = responses
        self._num_calls: Counter[str] = Counter()

    def __call__(
        self, token_ids: SequenceABC[int], params: SamplingParams, rollout_id: str
    ) -> SequenceABC[int]:
        index = self._num_calls[rollout_id]
        self._num_calls[rollout_id] += 1
        return self._responses[index % len(self._responses)]


def _cut(said: SequenceABC[int], params: SamplingParams) -> tuple[SequenceABC[int], FinishReason]:
    """Cut a response at its first stop id or at `max_new_tokens`, whichever comes first.

    A response that simply ends counts as stopped, as one ended by a stop string would.
    """
    if len(said) < params.min_new_tokens:
        raise EngineError(
            f"the script says {len(said)} tokens where min_new_tokens is {params.min_new_tokens}: "
            "write a longer response"
        )
    window = said[: params.max_new_tokens]
    for index in range(max(params.min_new_tokens - 1, 0), len(window)):
        if window[index] in params.stop_token_ids:
            return window[: index + 1], "stop"
    return window, "stop" if len(said) < params.max_new_tokens else "length"
