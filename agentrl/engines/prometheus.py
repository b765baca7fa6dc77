"""Reading a server's Prometheus metrics: counters as differences, histograms as quantiles."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Histogram", "Snapshot", "parse"]

_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_BOUND = re.compile(r'le="([^"]+)"')


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observations, of which only the sum, the number and a cumulative count by bound are known."""

    total: float = 0.0
    count: float = 0.0
    buckets: Mapping[float, float] = field(default_factory=dict)

    def __add__(self, other: Histogram) -> Histogram:
        """Both together; they have the same bounds, or one is empty."""
        bounds = self.buckets.keys() | other.buckets.keys()
        return Histogram(
            self.total + other.total,
            self.count + other.count,
            {b: self.buckets.get(b, 0.0) + other.buckets.get(b, 0.0) for b in bounds},
        )

    def mean(self) -> float | None:
        """None when nothing was observed."""
        return self.total / self.count if self.count > 0 else None

    def quantile(self, quantile: float) -> float | None:
        """By linear interpolation within a bucket, as Prometheus' own function does.

        The last bucket has no upper bound: its lower one is returned. None when nothing was
        observed.
        """
        bounds = sorted(self.buckets.items())
        if not bounds or bounds[-1][1] <= 0:
            return None
        wanted = quantile * bounds[-1][1]
        lower, below = 0.0, 0.0
        for upper, count in bounds:
            if count >= wanted and count > below:
                if math.isinf(upper):
                    return lower
                return lower + (upper - lower) * (wanted - below) / (count - below)
            lower, below = upper, count
        return lower


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Metrics at one moment, summed over labels (ranks, models, reasons).

    `values` holds counters, gauges, and the `_sum` and `_count` of histograms, `series` over how
    many series each was summed; `buckets[name]` maps an upper bound to the cumulative count of a
    histogram.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    buckets: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    series: Mapping[str, int] = field(default_factory=dict)

    def gauge(self, name: str) -> float | None:
        """The mean over its series; None where the server has no such gauge."""
        return self.values[name] / self.series[name] if name in self.values else None

    def histogram(self, name: str) -> Histogram:
        """The histogram of that name; an empty one where the server has none."""
        return Histogram(
            self.values.get(f"{name}_sum", 0.0),
            self.values.get(f"{name}_count", 0.0),
            self.buckets.get(name, {}),
        )

    def minus(self, earlier: Snapshot) -> Snapshot:
        """What was counted since `earlier`. Gauges in the result mean nothing."""
        return Snapshot(
            {k: v - earlier.values.get(k, 0.0) for k, v in self.values.items()},
            {
                name: {
                    bound: count - earlier.buckets.get(name, {}).get(bound, 0.0)
                    for bound, count in bounds.items()
                }
                for name, bounds in self.buckets.items()
            },
        )


def parse(text: str) -> Snapshot:
    """Read the text format, https://prometheus.io/docs/instrumenting/exposition_formats/."""
    values: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    series: dict[str, int] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None or line.startswith("#"):
            continue
        name, labels, value = match["name"], match["labels"] or "", float(match["value"])
        bound = _BOUND.search(labels)
        if name.endswith("_bucket") and bound is not None:
            counts = buckets.setdefault(name.removesuffix("_bucket"), {})
            limit = float(bound[1])
            counts[limit] = counts.get(limit, 0.0) + value
        else:
            values[name] = values.get(name, 0.0) + value
            series[name] = series.get(name, 0) + 1
    return Snapshot(values, buckets, series)
