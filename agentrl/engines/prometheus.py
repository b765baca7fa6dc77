"""Reading a server's Prometheus metrics: counters as differences, histograms as quantiles."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Snapshot", "histogram_mean", "histogram_quantile", "parse"]

_SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_BOUND = re.compile(r'le="([^"]+)"')


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Metrics at one moment, summed over labels (ranks, models, reasons).

    `values` holds counters, gauges, and the `_sum` and `_count` of histograms; `buckets[name]` maps
    an upper bound to the cumulative count of a histogram.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    buckets: Mapping[str, Mapping[float, float]] = field(default_factory=dict)

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
    return Snapshot(values, buckets)


def histogram_mean(snapshot: Snapshot, name: str) -> float | None:
    """Mean of a histogram, None when nothing was observed."""
    count = snapshot.values.get(f"{name}_count", 0.0)
    return snapshot.values[f"{name}_sum"] / count if count > 0 else None


def histogram_quantile(snapshot: Snapshot, name: str, quantile: float) -> float | None:
    """Quantile by linear interpolation within a bucket, as Prometheus' own function does.

    The last bucket has no upper bound: its lower one is returned. None when nothing was observed.
    """
    bounds = sorted(snapshot.buckets.get(name, {}).items())
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
