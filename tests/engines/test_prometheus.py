"""Server metrics: counters as differences, histograms as means and quantiles."""

from __future__ import annotations

import pytest

from agentrl.engines.prometheus import Histogram, Snapshot, parse

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


def test_a_gauge_is_averaged_over_its_series_and_absent_where_the_server_has_none() -> None:
    assert parse(TEXT).gauge("vllm:num_preemptions_total") == 3.5
    assert parse(TEXT).gauge("vllm:kv_cache_usage_perc") is None


def test_the_mean_is_sum_over_count() -> None:
    assert parse(TEXT).histogram("vllm:ttft").mean() == pytest.approx(0.15)


def test_quantiles_are_interpolated_within_their_bucket() -> None:
    ttft = parse(TEXT).histogram("vllm:ttft")
    assert ttft.quantile(0.25) == pytest.approx(0.05)
    assert ttft.quantile(0.7) == pytest.approx(0.15)
    assert ttft.quantile(0.99) == pytest.approx(0.2)


def test_only_what_came_since_the_last_snapshot_counts() -> None:
    earlier, later = parse(TEXT), parse(TEXT.replace("} 10.0", "} 12.0").replace("1.5", "2.5"))
    assert later.minus(earlier).histogram("vllm:ttft").mean() == pytest.approx(0.5)


def test_histograms_of_two_servers_add_up() -> None:
    ttft = parse(TEXT).histogram("vllm:ttft")
    both = ttft + Histogram(4.5, 10, {0.1: 0.0, 0.2: 1.0, float("inf"): 10.0})
    assert both.mean() == pytest.approx(0.3)
    assert both.quantile(0.5) == pytest.approx(0.2)  # 5 below 0.1, 10 below 0.2, of 20
    assert (Histogram() + ttft).quantile(0.25) == ttft.quantile(0.25)


def test_nothing_observed_is_none_not_zero() -> None:
    assert Snapshot().histogram("x").mean() is None
    nothing = parse(TEXT).minus(parse(TEXT)).histogram("vllm:ttft")
    assert (nothing.mean(), nothing.quantile(0.5)) == (None, None)
