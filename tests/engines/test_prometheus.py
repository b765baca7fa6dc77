"""Server metrics: counters as differences, histograms as means and quantiles."""

from __future__ import annotations

import pytest

from agentrl.engines.prometheus import Snapshot, histogram_mean, histogram_quantile, parse

TEXT = """# HELP vllm:ttft Time to first token.
# TYPE vllm:ttft histogram
vllm:ttft_bucket{engine="0",le="0.1"} 5.0
vllm:ttft_bucket{engine="0",le="0.2"} 9.0
vllm:ttft_bucket{engine="0",le="+Inf"} 10.0
vllm:ttft_sum{engine="0"} 1.5
vllm:ttft_count{engine="0"} 10.0
vllm:num_preemptions_total{engine="0",model_name="a b"} 3.0
vllm:num_preemptions_total{engine="1",model_name="a b"} 4.0
"""


def test_values_are_added_up_over_labels() -> None:
    assert parse(TEXT).values["vllm:num_preemptions_total"] == 7.0


def test_the_mean_is_sum_over_count() -> None:
    assert histogram_mean(parse(TEXT), "vllm:ttft") == pytest.approx(0.15)


def test_quantiles_are_interpolated_within_their_bucket() -> None:
    snapshot = parse(TEXT)
    assert histogram_quantile(snapshot, "vllm:ttft", 0.25) == pytest.approx(0.05)
    assert histogram_quantile(snapshot, "vllm:ttft", 0.7) == pytest.approx(0.15)
    assert histogram_quantile(snapshot, "vllm:ttft", 0.99) == pytest.approx(0.2)


def test_only_what_came_since_the_last_snapshot_counts() -> None:
    earlier, later = parse(TEXT), parse(TEXT.replace("} 10.0", "} 12.0").replace("1.5", "2.5"))
    since = later.minus(earlier)
    assert histogram_mean(since, "vllm:ttft") == pytest.approx(0.5)


def test_nothing_observed_is_none_not_zero() -> None:
    assert histogram_mean(Snapshot(), "x") is None
    assert histogram_quantile(parse(TEXT).minus(parse(TEXT)), "vllm:ttft", 0.5) is None
