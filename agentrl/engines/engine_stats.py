"""What one engine counted: its requests as agentrl saw them, and its server's own metrics.

Names are those users know: TTFT (time to first token), TPOT (time per output token), latency
quantiles, prefix-cache hit rate, KV-cache use, preemptions. Times are in seconds. docs/metrics.md
lists them all.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from agentrl.engines.prometheus import Histogram, Snapshot
from agentrl.types import FinishReason

__all__ = ["Answer", "EngineCounts", "EngineStats", "MetricNames"]

LATENCIES = ("ttft", "tpot")


class Answer(Protocol):
    """What is counted of a request that was answered; a `Generation` is one."""

    @property
    def num_sampled(self) -> int:
        """Sampled tokens."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the engine had cached."""

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended."""


@dataclass(frozen=True, slots=True)
class MetricNames:
    """What a kind of server calls its metrics."""

    ttft: str
    tpot: str
    kv_usage: str
    preemptions: str
    counts_preemptions: str
    """Where the server has this one, preemptions that it does not list are none."""


@dataclass(slots=True)
class EngineCounts:
    """What was counted in one span of time. The counts of several engines add up.

    `observed` holds every value of a name, `histograms` those of which a server tells the
    distribution only. `rates` are tokens per second in which at least one request was in flight.
    """

    counts: Counter[str] = field(default_factory=Counter)
    observed: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    histograms: dict[str, Histogram] = field(default_factory=lambda: defaultdict(Histogram))
    rates: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def __add__(self, other: EngineCounts) -> EngineCounts:
        """Both engines together."""
        total = EngineCounts()
        for part in (self, other):
            total.counts.update(part.counts)
            for name, rate in part.rates.items():
                total.rates[name] += rate
            for name, values in part.observed.items():
                total.observed[name] += values
            for name, histogram in part.histograms.items():
                total.histograms[name] += histogram
        return total

    def metrics(self) -> dict[str, float]:
        """The numbers by name; those of which nothing is known are left out."""
        counts, result = self.counts, {name: float(n) for name, n in self.counts.items()}
        if requests := counts["requests"]:
            result["abort_ratio"] = (
                counts["finish_abort"] + counts["cancelled_requests"]
            ) / requests
            result["timeout_ratio"] = counts["timed_out_requests"] / requests
            result["response_clip_ratio"] = counts["finish_length"] / requests
        if counts["prompt_tokens"]:
            result["prefix_cache_hit_rate"] = counts["cached_tokens"] / counts["prompt_tokens"]
        result |= self.rates
        if latencies := self.observed.get("request_latency"):
            median, late = np.quantile(latencies, [0.5, 0.99])
            result |= {"request_latency_p50": float(median), "request_latency_p99": float(late)}
        if readings := self.observed.get("kv_cache_usage"):
            result["kv_cache_usage"] = float(np.mean(readings))
            result["kv_cache_usage_max"] = max(readings)
        for name in LATENCIES:
            result |= self._mean_and_late(name)
        return result

    def _mean_and_late(self, name: str) -> dict[str, float]:
        if values := self.observed.get(name):
            late = float(np.quantile(values, 0.99))
            return {f"{name}_mean": float(np.mean(values)), f"{name}_p99": late}
        histogram = self.histograms.get(name, Histogram())
        found = {f"{name}_mean": histogram.mean(), f"{name}_p99": histogram.quantile(0.99)}
        return {key: value for key, value in found.items() if value is not None}


class EngineStats:
    """Counts since the last `take`.

    Args:
        names: what the server calls its metrics, if there is a server.
        clock: seconds.
    """

    def __init__(
        self, names: MetricNames | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._names = names
        self._clock = clock
        self._current = EngineCounts()
        self._in_flight = 0
        self._busy_since = 0.0
        self._busy_seconds = 0.0
        self._reported = Snapshot()
        self._newest: Snapshot | None = None

    @property
    def in_flight(self) -> int:
        """Requests that were begun and have not ended."""
        return self._in_flight

    @contextmanager
    def request(self) -> Iterator[Callable[[], float]]:
        """Around one request; gives a function that tells the seconds since its begin."""
        began = self._clock()
        if self._in_flight == 0:
            self._busy_since = began
        self._in_flight += 1
        try:
            yield lambda: self._clock() - began
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._busy_seconds += self._clock() - self._busy_since

    def record(
        self,
        prompt_tokens: int,
        answer: Answer,
        seconds: float,
        first_token_seconds: float | None = None,
    ) -> None:
        """Count one request that was answered.

        Args:
            prompt_tokens: of the prompt, cached ones included.
            answer: what came of it.
            seconds: from the request to the answer.
            first_token_seconds: to the first token, where the engine tells.
        """
        counts, sampled = self._current.counts, answer.num_sampled
        counts["requests"] += 1
        counts["prompt_tokens"] += prompt_tokens
        counts["cached_tokens"] += answer.cached_tokens
        counts["sampled_tokens"] += sampled
        counts[f"finish_{answer.finish_reason}"] += 1
        self._current.observed["request_latency"].append(seconds)
        if first_token_seconds is not None:
            self._current.observed["ttft"].append(first_token_seconds)
            if sampled > 1:
                per_token = (seconds - first_token_seconds) / (sampled - 1)
                self._current.observed["tpot"].append(per_token)

    def record_unanswered(self, how: Literal["failed", "timed_out", "cancelled"]) -> None:
        """Count one request without an answer: `failed`, `timed_out` or `cancelled`."""
        self._current.counts["requests"] += 1
        self._current.counts[f"{how}_requests"] += 1

    def record_server(self, snapshot: Snapshot) -> None:
        """Keep the server's metrics of this moment; how full its cache is counts as a reading."""
        assert self._names is not None
        self._newest = snapshot
        usage = snapshot.gauge(self._names.kv_usage)
        if usage is not None and self._in_flight:
            self._current.observed["kv_cache_usage"].append(usage)

    def forget_server(self) -> None:
        """The server was started again: its counters begin at zero."""
        self._reported, self._newest = Snapshot(), None

    def take(self) -> EngineCounts:
        """What was counted since the last call."""
        taken, self._current = self._current, EngineCounts()
        busy, now = self._busy_seconds, self._clock()
        if self._in_flight:
            busy, self._busy_since = busy + now - self._busy_since, now
        self._busy_seconds = 0.0
        if busy > 0:
            counts = taken.counts
            computed = counts["prompt_tokens"] - counts["cached_tokens"]
            taken.rates["prefill_tokens_per_second"] = computed / busy
            taken.rates["decode_tokens_per_second"] = counts["sampled_tokens"] / busy
        if self._newest is not None and self._names is not None:
            since = self._newest.minus(self._reported)
            self._reported = self._newest
            taken.histograms["ttft"] = since.histogram(self._names.ttft)
            taken.histograms["tpot"] = since.histogram(self._names.tpot)
            if self._names.counts_preemptions in since.values:
                taken.counts["preemptions"] += int(since.values.get(self._names.preemptions, 0))
        return taken
