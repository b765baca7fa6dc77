"""The core types: what an episode is made of, exact to the token.

Shapes: T tokens of a sequence, R tokens sampled in one engine call.
Arrays are numpy: token ids and versions int32, log-probabilities float32, masks bool.
Everything here is frozen and checks itself when built; an inconsistency raises `ValueError`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Action",
    "Example",
    "FinishReason",
    "Generation",
    "Message",
    "Observation",
    "SamplingParams",
    "Sequence",
    "StepResult",
    "StopReason",
    "Timings",
    "ToolCall",
    "Trajectory",
    "Turn",
]

Message: TypeAlias = dict[str, Any]
"""A chat message as transformers' chat templates take it: role, content, tool_calls, ..."""

Example: TypeAlias = dict[str, Any]
"""One row of data: what `reset` receives."""

FinishReason: TypeAlias = Literal["stop", "length", "abort"]


class StopReason(StrEnum):
    """Why an episode ended. The last three are infrastructure: they never carry a reward."""

    DONE = "done"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    TIMEOUT = "timeout"
    ENV_ERROR = "env_error"
    ENGINE_ERROR = "engine_error"
    CANCELLED = "cancelled"

    @property
    def failed(self) -> bool:
        """True where the episode broke rather than ended: it is retried, never scored."""
        return self not in (StopReason.DONE, StopReason.MAX_TURNS, StopReason.MAX_TOKENS)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one engine call samples. Log-probabilities are those of this distribution.

    `temperature` 0 is greedy. `top_k` 0 means all tokens. `stop_token_ids` end the turn and are
    kept in the output. `seed` makes the call repeatable where the engine can.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    logprobs: bool = True

    def __post_init__(self) -> None:
        _require(self.max_new_tokens >= 1, f"max_new_tokens is {self.max_new_tokens}, must be >= 1")
        _require(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            f"min_new_tokens is {self.min_new_tokens}, must be in [0, {self.max_new_tokens}]",
        )
        _require(
            math.isfinite(self.temperature) and self.temperature >= 0,
            f"temperature is {self.temperature}, must be finite and >= 0",
        )
        _require(0 < self.top_p <= 1, f"top_p is {self.top_p}, must be in (0, 1]")
        _require(self.top_k >= 0, f"top_k is {self.top_k}, must be >= 0 (0 keeps every token)")


@dataclass(frozen=True, slots=True)
class Generation:
    """What one engine call sampled. All arrays have length R.

    `logprobs` is None when the engine was not asked for them. `weight_versions` says which policy
    version sampled each token. The stop token, if one was sampled, is the last id.
    `cached_tokens` counts prompt tokens that the engine did not compute again. `temperature` is
    the one it was sampled at, which the learner must apply again. `routed_experts` int16
    [C, layers, k], where the engine was asked for it: the experts of each token that was computed,
    all of prompt and response but the last; -1 where it is not known.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32] | None
    weight_versions: NDArray[np.int32]
    finish_reason: FinishReason
    cached_tokens: int = 0
    temperature: float = 1.0
    routed_experts: NDArray[np.int16] | None = None

    def __post_init__(self) -> None:
        _as_array(self, "token_ids", np.int32)
        _as_array(self, "weight_versions", np.int32)
        if self.routed_experts is not None:
            _as_array(self, "routed_experts", np.int16, ndim=3)
        length = len(self.token_ids)
        _require(
            len(self.weight_versions) == length,
            f"weight_versions has length {len(self.weight_versions)}, token_ids {length}",
        )
        _require(
            self.finish_reason in ("stop", "length", "abort"),
            f"finish_reason {self.finish_reason!r} is not stop, length or abort",
        )
        if self.logprobs is not None:
            _as_array(self, "logprobs", np.float32)
            _require(
                len(self.logprobs) == length,
                f"logprobs has length {len(self.logprobs)}, token_ids {length}",
            )
            _require(
                not bool(np.isnan(self.logprobs).any()),
                "logprobs holds NaN for a sampled token: the engine must report every one",
            )

    @property
    def num_sampled(self) -> int:
        """How many tokens were sampled."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Turn:
    """One span of sampled tokens `[start, end)` in a sequence, with what came of it."""

    start: int
    end: int
    finish_reason: FinishReason
    reward: float | None = None
    cached_tokens: int = 0
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Sequence:
    """What one forward pass of the policy sees.

    token_ids[T] int32; response_mask[T] bool, true exactly where the policy sampled the token;
    logprobs[T] float32 of the sampled token under the distribution it was sampled from, NaN
    elsewhere (None as a whole when the sampler was not asked for them); weight_versions[T] int32,
    the policy version that sampled the token, -1 elsewhere; turns cover the mask exactly;
    routed_experts[T, layers, k] int16, the experts that the sampler sent each token to, -1 where
    that is not known (None as a whole when it was not asked for them).
    """

    token_ids: NDArray[np.int32]
    response_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32] | None
    weight_versions: NDArray[np.int32]
    turns: tuple[Turn, ...] = ()
    routed_experts: NDArray[np.int16] | None = None

    def __post_init__(self) -> None:
        _as_array(self, "token_ids", np.int32)
        _as_array(self, "response_mask", np.bool_)
        _as_array(self, "weight_versions", np.int32)
        if self.logprobs is not None:
            _as_array(self, "logprobs", np.float32)
        if self.routed_experts is not None:
            _as_array(self, "routed_experts", np.int16, ndim=3)
        length = len(self.token_ids)
        for name in ("response_mask", "logprobs", "weight_versions", "routed_experts"):
            value = getattr(self, name)
            _require(
                value is None or len(value) == length,
                f"{name} has length {0 if value is None else len(value)}, token_ids {length}",
            )
        mask = self.response_mask
        _require(
            np.array_equal(self.weight_versions >= 0, mask),
            "weight_versions must be >= 0 exactly where response_mask is true",
        )
        if self.logprobs is not None:
            _require(
                np.array_equal(~np.isnan(self.logprobs), mask),
                "logprobs must be numbers where response_mask is true and NaN elsewhere; "
                "a missing log-probability is an error, not a zero",
            )
        covered = np.zeros(length, dtype=np.bool_)
        for turn in self.turns:
            _require(
                0 <= turn.start <= turn.end <= length and not covered[turn.start : turn.end].any(),
                f"turn [{turn.start}, {turn.end}) overlaps another or leaves the sequence",
            )
            covered[turn.start : turn.end] = True
        _require(np.array_equal(covered, mask), "turns must cover exactly the response_mask")

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_sampled(self) -> int:
        """How many tokens the policy sampled."""
        return int(self.response_mask.sum())


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds that one episode spent waiting to start, in the engine, in the environment."""

    queue: float = 0.0
    engine: float = 0.0
    env: float = 0.0


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode.

    `sequences` holds one element if the context only ever grew, more when it was rewritten.
    `reward` None means not scorable: no gradient, and no part in a group's baseline. `score` is
    the task's own measure where the reward is shaped, otherwise the same number.
    `group_id` is shared by the samples of one example; `rollout_id` is unique in a run and
    the same for every retry of one member.
    """

    sequences: tuple[Sequence, ...]
    reward: float | None
    stop_reason: StopReason
    example_id: str = ""
    group_id: str = ""
    rollout_id: str = ""
    score: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    timings: Timings = Timings()
    messages: tuple[Message, ...] = ()
    error: str | None = None

    def __post_init__(self) -> None:
        _require(
            self.reward is None or math.isfinite(self.reward),
            f"reward is {self.reward}: a reward must be a finite number, or None if not scorable",
        )
        _require(
            not (self.stop_reason.failed and self.reward is not None),
            f"an episode that ended as {self.stop_reason} cannot carry a reward",
        )

    @property
    def truncated(self) -> bool:
        """True when the episode was cut: by tokens, by turns, or in its last sampled turn."""
        if self.stop_reason in (StopReason.MAX_TOKENS, StopReason.MAX_TURNS):
            return True
        turns = self.sequences[-1].turns if self.sequences else ()
        return bool(turns) and turns[-1].finish_reason == "length"

    @property
    def num_turns(self) -> int:
        """How many spans were sampled, over all sequences."""
        return sum(len(sequence.turns) for sequence in self.sequences)

    @property
    def num_sampled(self) -> int:
        """How many tokens were sampled, over all sequences."""
        return sum(sequence.num_sampled for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model wrote. `error` is set where its arguments could not be read."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Observation:
    """What the environment says.

    `content` is one user message (a str), a list of messages, or, with `raw`, text that goes into
    the context as it is, without the chat template. `tools` (JSON schemas) count in `reset` only.
    """

    content: str | SequenceABC[Message]
    raw: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        _require(
            not self.raw or isinstance(self.content, str),
            "a raw observation must be a str: messages go through the chat template",
        )


@dataclass(frozen=True, slots=True)
class Action:
    """What the policy did in one turn: exact ids, their text without end-of-turn tokens, calls."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    turn_index: int
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What `step` returns.

    `reward` adds to the episode's reward; None means this step gives none (an episode in which
    every step gave None is not scorable). `score` is the task's own measure (0 to 1) where the
    reward is shaped: filters and pass@k use it. `sampling` overrides fields of the next turn's
    `SamplingParams`. `metrics` are averaged into the log.
    """

    observation: str | SequenceABC[Message] | Observation | None = None
    reward: float | None = None
    done: bool = False
    score: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("reward", "score"):
            if getattr(self, name) is not None:
                _as_finite_float(self, name)
        _require(
            self.done or self.observation is not None,
            "a step that is not done must return an observation for the next turn",
        )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _as_finite_float(owner: object, name: str) -> None:
    """Convert a field of a frozen dataclass: a number, or a one-element numpy or torch value."""
    value = getattr(owner, name)
    try:
        item = value.item() if hasattr(value, "item") else value
        number = math.nan if isinstance(item, str) else float(item)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    _require(math.isfinite(number), f"{name} is {value!r}: it must be one finite number, or None")
    object.__setattr__(owner, name, number)


def _as_array(owner: object, name: str, dtype: type[np.generic], ndim: int = 1) -> None:
    """Convert a field of a frozen dataclass to an array of `dtype`."""
    array = np.asarray(getattr(owner, name), dtype=dtype)
    _require(array.ndim == ndim, f"{name} has shape {array.shape}, must have {ndim} dimension(s)")
    array = array.view()
    array.flags.writeable = False
    object.__setattr__(owner, name, array)
