"""The metrics of rollouts, each against a value worked out by hand."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import numpy as np
import pytest
from engines.conftest import REAL, EngineUnderTest
from engines.test_pool import running
from engines.tiny import EOS
from transformers import PreTrainedModel

from agentrl.engines.engine_stats import EngineCounts, EngineStats, MetricNames
from agentrl.engines.prometheus import parse
from agentrl.engines.remote import RemoteEngine
from agentrl.errors import EngineError
from agentrl.train.stats import engine_metrics
from agentrl.types import FinishReason, Generation, SamplingParams

NAMES = MetricNames("ttft", "tpot", "usage", "preemptions", "preemptions")


async def tell(engine: RemoteEngine, route: str, **body: str) -> None:
    """Tell the fake server what only tests tell it."""
    assert engine.server is not None
    await asyncio.to_thread(httpx.post, f"{engine.server.url}{route}", json=body)


class Clock:
    """A clock that the test turns."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def generation(tokens: int, finish_reason: FinishReason = "stop", cached: int = 0) -> Generation:
    ids = np.zeros(tokens)
    return Generation(ids, None, ids, finish_reason, cached_tokens=cached)


def test_rates_count_the_time_in_which_something_was_in_flight() -> None:
    clock = Clock()
    stats = EngineStats(clock=clock)
    with stats.request():
        clock.now = 2.0
        with stats.request() as elapsed:
            clock.now = 3.0
            assert elapsed() == 1.0
            stats.record(50, generation(20, cached=10), elapsed())
    clock.now = 100.0
    with stats.request() as elapsed:
        clock.now = 101.0
        stats.record(30, generation(60), elapsed())
    metrics = stats.take().metrics()
    # 4 s at work; 80 prompt tokens, of which 10 were cached, and 80 sampled ones
    assert metrics["prefill_tokens_per_second"] == pytest.approx(70 / 4)
    assert metrics["decode_tokens_per_second"] == pytest.approx(80 / 4)
    assert metrics["prefix_cache_hit_rate"] == pytest.approx(10 / 80)
    assert stats.take().metrics() == {}


def test_a_request_in_flight_counts_in_both_spans_that_it_lies_in() -> None:
    clock = Clock()
    stats = EngineStats(clock=clock)
    with stats.request() as elapsed:
        clock.now = 5.0
        assert stats.take().metrics()["decode_tokens_per_second"] == 0.0
        clock.now = 7.0
        stats.record(10, generation(8), elapsed())
    assert stats.take().metrics()["decode_tokens_per_second"] == pytest.approx(8 / 2)


def test_ratios_are_shares_of_all_requests() -> None:
    stats = EngineStats()
    for reason in ("stop", "stop", "length", "length", "length", "abort"):
        stats.record(4, generation(2, reason), 1.0)  # type: ignore[arg-type]
    stats.record_unanswered("cancelled")
    stats.record_unanswered("timed_out")
    stats.record_unanswered("failed")
    stats.record_unanswered("failed")
    metrics = stats.take().metrics()
    assert metrics["requests"] == 10
    assert metrics["abort_ratio"] == pytest.approx(0.2)
    assert metrics["timeout_ratio"] == pytest.approx(0.1)
    assert metrics["response_clip_ratio"] == pytest.approx(0.3)
    assert metrics["failed_requests"] == 2


def test_latencies_are_those_of_each_request() -> None:
    stats = EngineStats()
    for seconds in range(1, 102):
        # the first token after 1 s, then one every (seconds - 1) / 10
        stats.record(4, generation(11), float(seconds), first_token_seconds=1.0)
    stats.record(4, generation(1), 51.0, first_token_seconds=1.0)  # no token after the first
    metrics = stats.take().metrics()
    assert metrics["request_latency_p50"] == pytest.approx(51.0)
    assert metrics["request_latency_p99"] == pytest.approx(100.0, abs=0.02)
    assert metrics["ttft_mean"] == metrics["ttft_p99"] == 1.0
    assert metrics["tpot_mean"] == pytest.approx(5.0)


def snapshot(fast: int, slow: int, usage: float, preemptions: int) -> str:
    """Requests with 0.05 s and 0.3 s to their first token."""
    return f"""ttft_bucket{{le="0.1"}} {fast}
ttft_bucket{{le="0.5"}} {fast + slow}
ttft_bucket{{le="+Inf"}} {fast + slow}
ttft_sum {0.05 * fast + 0.3 * slow}
ttft_count {fast + slow}
usage{{engine="0"}} {usage}
usage{{engine="1"}} {usage / 2}
preemptions{{engine="0"}} {preemptions}
"""


def test_a_servers_metrics_are_those_since_the_last_time() -> None:
    stats = EngineStats(NAMES)
    stats.record_server(parse(snapshot(10, 0, 0.9, 3)))
    stats.take()
    with stats.request():
        stats.record_server(parse(snapshot(11, 1, 0.8, 4)))
        stats.record_server(parse(snapshot(13, 2, 0.4, 5)))
    stats.record_server(parse(snapshot(13, 3, 0.0, 5)))  # nothing in flight: no reading of use
    metrics = stats.take().metrics()
    assert metrics["ttft_mean"] == pytest.approx((3 * 0.05 + 3 * 0.3) / 6)
    assert metrics["ttft_p99"] == pytest.approx(0.1 + 0.4 * (0.99 * 6 - 3) / 3)
    assert metrics["preemptions"] == 2
    # over two ranks: 0.6, then 0.3
    assert metrics["kv_cache_usage"] == pytest.approx(0.45)
    assert metrics["kv_cache_usage_max"] == pytest.approx(0.6)
    assert "tpot_mean" not in metrics


def test_preemptions_that_a_server_counts_and_does_not_list_are_none() -> None:
    stats = EngineStats(MetricNames("ttft", "tpot", "usage", "total", "last"))
    stats.record_server(parse("last 0\n"))
    assert stats.take().metrics()["preemptions"] == 0
    stats.record_server(parse("last 2\ntotal 2\n"))
    assert stats.take().metrics()["preemptions"] == 2
    other = EngineStats(MetricNames("ttft", "tpot", "usage", "total", "last"))
    other.record_server(parse("usage 0.5\n"))
    assert "preemptions" not in other.take().metrics()


def test_engines_add_up_as_if_they_were_one() -> None:
    clock = Clock()
    total = EngineCounts()
    for seconds, fast in ((1.0, 9), (3.0, 1)):
        stats = EngineStats(NAMES, clock=clock)
        with stats.request():
            clock.now += 2.0
            stats.record(10, generation(20, cached=5), seconds)
        stats.record_server(parse(snapshot(fast, 10 - fast, 0.0, 1)))
        total += stats.take()
    metrics = total.metrics()
    assert metrics["requests"] == 2
    assert metrics["decode_tokens_per_second"] == pytest.approx(20.0)
    assert metrics["request_latency_p50"] == pytest.approx(2.0)
    assert metrics["prefix_cache_hit_rate"] == pytest.approx(0.5)
    assert metrics["ttft_mean"] == pytest.approx((10 * 0.05 + 10 * 0.3) / 20)
    assert metrics["preemptions"] == 2


VLLM = """vllm:time_to_first_token_seconds_bucket{engine="0",le="0.5"} 2.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf"} 2.0
vllm:time_to_first_token_seconds_sum{engine="0"} 0.5
vllm:time_to_first_token_seconds_count{engine="0"} 2.0
vllm:request_time_per_output_token_seconds_sum{engine="0"} 0.08
vllm:request_time_per_output_token_seconds_count{engine="0"} 2.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:num_preemptions_total{engine="0"} 7.0
"""
SGLANG = """sglang:time_to_first_token_seconds_bucket{le="0.5"} 2.0
sglang:time_to_first_token_seconds_bucket{le="+Inf"} 2.0
sglang:time_to_first_token_seconds_sum{tp_rank="0"} 0.5
sglang:time_to_first_token_seconds_count{tp_rank="0"} 2.0
sglang:request_time_per_output_token_seconds_sum{tp_rank="0"} 0.08
sglang:request_time_per_output_token_seconds_count{tp_rank="0"} 2.0
sglang:token_usage{tp_rank="0"} 0.25
sglang:num_retracted_requests_total{tp_rank="0"} 7.0
sglang:num_retracted_reqs{tp_rank="0"} 0.0
"""


@pytest.mark.parametrize(("kind", "text"), [("fake-vllm", VLLM), ("fake-sglang", SGLANG)])
async def test_a_rollout_on_servers_tells_every_metric(
    kind: str, text: str, models: list[PreTrainedModel], model_folder: Path, tmp_path: Path
) -> None:
    prompt = list(range(3, 52))
    async with running(kind, model_folder, tmp_path) as pool:
        (engine,) = pool.engines
        await tell(engine, "/fake/metrics", text=text)
        first = await pool.generate(prompt, SamplingParams(4, temperature=0))
        slow = asyncio.create_task(pool.generate(prompt, SamplingParams(100, temperature=2.0)))
        await asyncio.sleep(0.05)
        await pool.generate(prompt, SamplingParams(4, temperature=0))  # one more is in flight
        await pool.refresh_stats()
        slow.cancel()
        with pytest.raises(asyncio.CancelledError):
            await slow
        await tell(engine, "/fake/fail", path="/inference/v1/generate")
        await tell(engine, "/fake/fail", path="/generate")
        with pytest.raises(EngineError):
            await pool.generate(prompt, SamplingParams(4, stop_token_ids=(EOS,)))
        metrics = engine_metrics(pool.stats())
    assert len(first.token_ids) == 4
    assert metrics["engine/requests"] == 4
    assert metrics["engine/response_clip_ratio"] == 0.5
    assert metrics["engine/abort_ratio"] == 0.25
    assert metrics["engine/failed_requests"] == 1
    assert metrics["engine/prefix_cache_hit_rate"] == pytest.approx(48 / 98)
    assert metrics["engine/ttft_mean"] == pytest.approx(0.25)
    assert metrics["engine/tpot_mean"] == pytest.approx(0.04)
    assert metrics["engine/kv_cache_usage"] == pytest.approx(0.25)
    assert metrics["engine/preemptions"] == 7
    assert metrics["engine/request_latency_p50"] <= metrics["engine/request_latency_p99"]
    assert metrics["engine/decode_tokens_per_second"] > 0
    assert metrics["engine/prefill_tokens_per_second"] > 0


async def test_a_request_that_is_too_slow_counts_as_timed_out(
    model_folder: Path, tmp_path: Path
) -> None:
    async with running(
        "fake-vllm", model_folder, tmp_path, request_timeout=0.3, extra={"token_seconds": 0.05}
    ) as pool:
        with pytest.raises(EngineError, match=r"engine\.request_timeout"):
            await pool.generate([5, 6], SamplingParams(100, temperature=2.0))
        stats = pool.stats()
    assert (stats["timeout_ratio"], stats["requests"]) == (1.0, 1.0)


@pytest.mark.parametrize("served", REAL, indirect=True)
@pytest.mark.asyncio(loop_scope="session")
async def test_a_real_server_tells_what_only_it_knows(served: EngineUnderTest) -> None:
    engine = served.engine
    await engine.refresh_stats()
    engine.stats()
    prompt = list(range(3, 60))
    slow = asyncio.create_task(engine.generate(prompt, SamplingParams(300, temperature=2.0)))
    await engine.generate(prompt, SamplingParams(8, temperature=0))
    await engine.refresh_stats()
    await slow
    await engine.refresh_stats()
    stats = engine.stats()
    assert 0 < stats["ttft_mean"] <= stats["request_latency_p99"]
    assert 0 < stats["tpot_mean"] < stats["request_latency_p99"]
    assert stats["tpot_mean"] < stats["request_latency_p99"] / 8
    assert 0 <= stats["kv_cache_usage"] <= stats["kv_cache_usage_max"] <= 1
    assert stats["preemptions"] == 0
    assert stats["sampled_tokens"] == 308
