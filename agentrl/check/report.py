"""What a check found: a list of findings, each with its remedy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

__all__ = ["Finding", "Level", "Report"]

Level = Literal["ok", "warning", "error"]

_STYLES: dict[Level, str] = {"ok": "green", "warning": "yellow", "error": "bold red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    `subject` is one word (reset, step, reward, ...), `message` what was seen, `remedy` what to do
    about it, `detail` the traceback where there is one.
    """

    level: Level
    subject: str
    message: str
    remedy: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """All findings about one agent. Print it with rich, or as plain text by `str`."""

    agent: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """False where there is an error; warnings do not count."""
        return all(finding.level != "error" for finding in self.findings)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(title=self.agent, title_justify="left", show_header=False, box=None)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column()
        for finding in self.findings:
            table.add_row(
                Text(finding.level, style=_STYLES[finding.level]),
                Text(finding.subject, style="bold"),
                _body(finding),
            )
        yield table
        yield Text(self._summary(), style=_STYLES["ok" if self.ok else "error"])

    def _lines(self) -> Iterator[str]:
        yield self.agent
        for finding in self.findings:
            yield f"{finding.level:8}{finding.subject:10}{finding.message}"
            for text in (finding.remedy, finding.detail):
                yield from (f"{'':18}{line}" for line in text.rstrip().splitlines())
        yield self._summary()

    def _summary(self) -> str:
        counts = {
            level: sum(finding.level == level for finding in self.findings)
            for level in ("error", "warning")
        }
        return ", ".join(f"{n} {level}{'' if n == 1 else 's'}" for level, n in counts.items())


def _body(finding: Finding) -> RenderableType:
    text = Text(finding.message)
    if finding.remedy:
        text.append(f"\n{finding.remedy}", style="italic")
    if finding.detail:
        text.append(f"\n{finding.detail.rstrip()}", style="dim")
    return text
