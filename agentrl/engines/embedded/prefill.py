"""Which prompt tokens are computed together: a plan of padded forward passes.

A span is (slot, start, end): positions that must be computed, in order within a slot. Short spans
share a forward pass where padding wastes less than passes cost; long ones are cut into chunks, so
that activations and masks stay small.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

__all__ = ["Span", "plan_prefill"]

Span: TypeAlias = tuple[int, int, int]

_CHUNK = 512
"""Most new tokens of one row in one pass."""
_BUDGET = 4096
"""Most tokens of one pass, padding included."""
_SLACK = 32
"""A row may be this much more than twice as long as another in its pass."""


def plan_prefill(spans: Iterable[Span]) -> Iterator[list[Span]]:
    """Yield the passes in the order they must run; each lists its spans by ascending slot."""
    pending = [span for span in spans if span[1] < span[2]]
    while pending:
        now = [(slot, start, min(end, start + _CHUNK)) for slot, start, end in pending]
        yield from _grouped(now)
        pending = [(slot, start + _CHUNK, end) for slot, start, end in pending]
        pending = [span for span in pending if span[1] < span[2]]


def _grouped(spans: list[Span]) -> Iterator[list[Span]]:
    """Put spans of similar width together, widest first."""
    group: list[Span] = []
    widest = 0
    for span in sorted(spans, key=lambda span: (span[1] - span[2], span[0])):
        width = span[2] - span[1]
        too_many = (len(group) + 1) * widest > _BUDGET
        if group and (too_many or widest > 2 * width + _SLACK):
            yield sorted(group)
            group = []
        if not group:
            widest = width
        group.append(span)
    if group:
        yield sorted(group)
