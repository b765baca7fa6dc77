"""An evaluation as a table for a person, or as JSON for a program."""

from __future__ import annotations

import json
import math

from rich.console import Console
from rich.table import Table

from agentrl.train.eval_result import EvalResult

__all__ = ["print_eval"]


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
    Console().print(table)


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"
