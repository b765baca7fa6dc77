"""report.html: one page that needs nothing but itself, and curve.png beside it.

Everything that a model or an environment wrote reaches the page as JSON whose `<`, `>`, `&` and
`'` are escaped, and the page's script only ever sets it as text; a content policy forbids the
page to load anything.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from agentrl.train.files import replace_text
from agentrl.train.metrics import EVAL_REWARD, REWARD
from agentrl.view.curve import save_curve
from agentrl.view.data import collect

__all__ = ["build_report"]


def build_report(run_dir: Path) -> Path:
    """Write `report.html` and `curve.png` into a run directory; return the page's path.

    Works on a run that is still going on, with what it has logged so far.

    Raises:
        UsageError: `run_dir` is not a run directory.
        SaveError: a file could not be written.
    """
    data = collect(run_dir)
    series = data["series"]
    save_curve(
        run_dir / "curve.png",
        _points(series.get(REWARD, [])),
        _points(series.get(EVAL_REWARD, [])),
        title=data["title"],
    )
    page = run_dir / "report.html"
    replace_text(page, _render(data))
    return page


def _points(series: list[tuple[int, float | None]]) -> list[tuple[int, float]]:
    return [(step, value) for step, value in series if value is not None]


def _render(data: dict[str, Any]) -> str:
    environment = Environment(
        loader=FunctionLoader(_asset), autoescape=True, undefined=StrictUndefined
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.globals["asset"] = lambda name: Markup(_asset(name))
    return environment.get_template("report.html").render(data=data, reward=REWARD)


def _asset(name: str) -> str:
    """A file of this package: ours, so it goes into the page as it is."""
    return files("agentrl.view").joinpath(name).read_text(encoding="utf-8")
