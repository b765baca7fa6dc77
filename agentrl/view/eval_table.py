"""An evaluation as a table for a person, or as JSON for a program."""

from __future__ import annotations

import json
import math

from rich.console import Console
from rich.table import Table

from agentrl.train.eval_result import EvalResult

__all__ = ["print_eval"]

_METRICS = {
    "engine/ttft_mean": ("time to first token", "s"),
    "engine/tpot_mean": ("time per output token", "s"),
    "engine/request_latency_p50": ("request latency, median", "s"),
    "engine/request_latency_p99": ("request latency, 99th percentile", "s"),
    "engine/prefill_tokens_per_second": ("prefill", "tok/s"),
    "engine/decode_tokens_per_second": ("decode", "tok/s"),
    "engine/prefix_cache_hit_rate": ("prefix-cache hit rate", ""),
    "engine/kv_cache_usage_max": ("most KV-cache use", ""),
    "engine/preemptions": ("preemptions", ""),
    "engine/abort_ratio": ("abort ratio", ""),
    "engine/timeout_ratio": ("timeout ratio", ""),
    "engine/response_clip_ratio": ("response clip ratio", ""),
    "mismatch/log_ratio_mean": ("sampler-learner log-ratio, mean", ""),
    "mismatch/log_ratio_max": ("sampler-learner log-ratio, max", ""),
    "mismatch/kl": ("sampler-learner KL", ""),
}
"""What the table shows of an engine's metrics: label and unit by the name in the log."""


def print_eval(result: EvalResult, *, as_json: bool = False) -> None:
    """Print `result` on stdout."""
    if as_json:
        print(json.dumps(result.to_dict()))
        return
    table = Table(title="Evaluation", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("mean reward", _number(result.reward_mean))
    table.add_row("standard error", _number(result.reward_stderr))
    for k, share in result.pass_at_k.items():
        table.add_row(f"pass@{k}", _number(share))
    table.add_section()
    table.add_row("examples", str(result.examples))
    table.add_row("episodes", str(result.episodes))
    table.add_row("not scored", str(result.unscored))
    table.add_row("turns per episode", _number(result.turns_mean))
    table.add_row("tokens per episode", _number(result.sampled_tokens_mean))
    table.add_section()
    for reason, episodes in result.stop_reasons.items():
        table.add_row(f"stopped: {reason}", f"{episodes} ({episodes / result.episodes:.0%})")
    known = [(name, *shown) for name, shown in _METRICS.items() if name in result.metrics]
    if known:
        table.add_section()
    for name, label, unit in known:
        table.add_row(label, f"{_number(result.metrics[name])} {unit}".rstrip())
    Console().print(table)


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"
