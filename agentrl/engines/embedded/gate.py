"""Waiting for every participant, so that batches do not depend on how fast callers are."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["ParticipantGate"]

logger = logging.getLogger(__name__)


class ParticipantGate:
    """Says whether the next step must wait for callers that are away.

    It waits `patience` seconds from the end of the last step (or from the first request after a
    lull). When that has passed once, it stays open until `close_again`, since batches depend on
    timing from then on anyway. Times are seconds of one monotonic clock, given by the caller.
    """

    def __init__(self, enabled: bool, patience: float) -> None:
        self._enabled = enabled
        self._patience = patience
        self._participants = 0
        self._given_up = False
        self._warned = False
        self._since = 0.0

    @contextmanager
    def participant(self) -> Iterator[None]:
        """Count one more caller to wait for."""
        self._participants += 1
        try:
            yield
        finally:
            self._participants -= 1

    def holds(self, present: int) -> bool:
        """True while fewer than all participants are present and it is worth waiting."""
        return self._enabled and not self._given_up and present < self._participants

    def restart(self, now: float) -> None:
        """Begin to count patience."""
        self._since = now

    def patience_left(self, now: float) -> float:
        """Seconds until waiting should end."""
        return max(0.0, self._since + self._patience - now)

    def give_up(self) -> None:
        """Stop waiting; the first time, say so."""
        self._given_up = True
        if not self._warned:
            self._warned = True
            logger.warning(
                "an environment took longer than %.1f s between two engine calls: sampling goes on "
                "without waiting for it, so this run will not repeat bit for bit "
                "(engine.deterministic=false silences this)",
                self._patience,
            )

    def close_again(self) -> None:
        """Wait for participants again: a new weight version begins."""
        self._given_up = False
