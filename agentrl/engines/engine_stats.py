"""What one engine counted: its requests as agentrl saw them, and its server's own metrics.

Names are those users know: TTFT (time to first token), TPOT (time per output token), latency
quantiles, prefix-cache hit rate, KV-cache use, preemptions. Times are in seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from agentrl.engines.prometheus import Snapshot, histogram_mean, histogram_quantile
from agentrl.types import Generation

__all__ = ["EngineStats", "MetricNames"]


@dataclass(frozen=True, slots=True)
class MetricNames:
    """What a kind of server calls its metrics."""

    ttft: str
    tpot: str
    kv_usage: str
    preemptions: str


class EngineStats:
    """Counters since the last `take`."""

    def __init__(self, names: MetricNames) -> None:
        self._names = names
        self._counts: Counter[str] = Counter()
        self._latencies: list[float] = []
        self._reported = Snapshot()
        self._newest: Snapshot | None = None

    def record(self, prompt_tokens: int, generation: Generation, seconds: float) -> None:
        """Count one request that was answered."""
        self._counts["requests"] += 1
        self._counts["prompt_tokens"] += prompt_tokens
        self._counts["cached_tokens"] += generation.cached_tokens
        self._counts["sampled_tokens"] += len(generation.token_ids)
        self._counts[f"finish_{generation.finish_reason}"] += 1
        self._latencies.append(seconds)

    def record_failure(self, *, timeout: bool) -> None:
        """Count one request that was not answered."""
        self._counts["requests"] += 1
        self._counts["timeouts" if timeout else "failures"] += 1

    def record_server(self, snapshot: Snapshot) -> None:
        """Keep the server's metrics of this moment."""
        self._newest = snapshot

    def forget_server(self) -> None:
        """The server was started again: its counters begin at zero."""
        self._reported, self._newest = Snapshot(), None

    def take(self) -> Mapping[str, float]:
        """All metrics since the last call; those of which nothing is known are left out."""
        counts, self._counts = self._counts, Counter()
        result: dict[str, float] = {name: float(value) for name, value in counts.items()}
        if requests := counts["requests"]:
            result["abort_ratio"] = counts["finish_abort"] / requests
            result["timeout_ratio"] = counts["timeouts"] / requests
            result["response_clip_ratio"] = counts["finish_length"] / requests
        if counts["prompt_tokens"]:
            result["prefix_cache_hit_rate"] = counts["cached_tokens"] / counts["prompt_tokens"]
        if self._latencies:
            median, late = np.quantile(self._latencies, [0.5, 0.99])
            result |= {"request_latency_p50": float(median), "request_latency_p99": float(late)}
            self._latencies = []
        if self._newest is not None:
            result |= self._server_metrics(self._newest)
        return result

    def _server_metrics(self, newest: Snapshot) -> dict[str, float]:
        names, since = self._names, newest.minus(self._reported)
        self._reported = newest
        found = {
            "ttft_mean": histogram_mean(since, names.ttft),
            "ttft_p99": histogram_quantile(since, names.ttft, 0.99),
            "tpot_mean": histogram_mean(since, names.tpot),
            "tpot_p99": histogram_quantile(since, names.tpot, 0.99),
            "kv_cache_usage": newest.values.get(names.kv_usage),
            "preemptions": since.values.get(names.preemptions),
        }
        return {name: value for name, value in found.items() if value is not None}
