"""Counts the API's answers that mean overload, which the SDK hides because it tries again by itself.

Every answer passes httpx, which logs it; a filter on that logger is the one place to see them
without touching the SDK. If a future httpx logs otherwise, nothing is counted and latency alone
tells of overload.
"""

from __future__ import annotations

import logging

from retrain.controllers.permits import OVERLOAD
from retrain.http_client import CALLING


class Answers(logging.Filter):
    """Counts this process's overload answers between `open` and `close`."""

    def __init__(self) -> None:
        super().__init__()
        self._refusals = 0
        self._level = self._shown_from = logging.WARNING

    def open(self) -> None:
        """Begin to count."""
        logger = logging.getLogger("httpx")
        self._level, self._shown_from = logger.level, logger.getEffectiveLevel()
        logger.addFilter(self)
        logger.setLevel(min(self._shown_from, logging.INFO))  # the level of its line about an answer

    def close(self) -> None:
        """Leave the logger as it was found."""
        logger = logging.getLogger("httpx")
        if self in logger.filters:
            logger.removeFilter(self)
            logger.setLevel(self._level)

    def take(self) -> int:
        """Return the number of overload answers since this was last asked: each is told once."""
        count, self._refusals = self._refusals, 0
        return count

    def filter(self, record: logging.LogRecord) -> bool:
        """Look at a record; let it through if it would have been shown anyway."""
        statuses = record.args if isinstance(record.args, tuple) and not CALLING.get() else ()
        if any(isinstance(status, int) and status in OVERLOAD for status in statuses):
            self._refusals += 1
        return record.levelno >= self._shown_from
