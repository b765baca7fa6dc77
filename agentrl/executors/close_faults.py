"""What `close` does wrong: in full the first time in a run, then only counted."""

from __future__ import annotations

import logging

__all__ = ["CloseFaults"]

logger = logging.getLogger(__name__)


class CloseFaults:
    """The faults of `close` in one run, whose episodes share it.

    Attributes:
        count: how many episodes' `close` raised or hung.
    """

    def __init__(self) -> None:
        self.count = 0

    def raised(self, where: str, error: BaseException) -> None:
        """`close` raised `error`."""
        self._note(f"{where} raised; the episode's result stands", error)

    def hung(self, where: str, seconds: float) -> None:
        """`close` did not return within `seconds`, which is `rollout.close_timeout`."""
        self._note(
            f"{where} did not return within {seconds:g} s and is left behind: make it faster, or "
            "raise rollout.close_timeout",
            None,
        )

    def _note(self, message: str, error: BaseException | None) -> None:
        self.count += 1
        if self.count == 1:
            logger.warning("%s (further faults of close are counted)", message, exc_info=error)
        elif str(self.count).strip("0") == "1":  # 10, 100, 1000
            logger.warning("close has raised or hung in %d episodes", self.count)
        else:
            logger.debug("%s", message, exc_info=error)
