"""When an engine is polled, and which notices the user gets while it does not answer.

One query covers all runs. It is sent every `poll_seconds`, and at least two seconds after the last one.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

LEAST_POLL_S = 2.0  # between two queries


class Asking:
    """The schedule of one launcher's queries."""

    def __init__(self, engine: str, every_s: float, say: Callable[[str], None]) -> None:
        """Start: the first query is due at once.

        Args:
            engine: its name, for notices.
            every_s: usual time between two queries.
            say: shows a notice to the user.
        """
        self._engine = engine
        self._every_s = every_s
        self._say = say
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._asked_at = float("-inf")
        self._due_at = float("-inf")
        self._is_silent = False

    def wait(self, timeout_s: float) -> bool:
        """Wait for the next query, `wake` or the timeout; return whether a query is due."""
        wait_s = min(timeout_s, self._due_at - time.monotonic())
        if wait_s > 0:
            self.rest(wait_s)
        return time.monotonic() >= self._due_at

    def rest(self, seconds: float) -> bool:
        """Wait for the given seconds or `wake`; return whether it was `wake`."""
        try:
            self._wakeups.get(timeout=seconds)
        except queue.Empty:
            return False
        return True

    def wake(self) -> None:
        """Make `wait` and `rest` return; safe in a signal handler."""
        self._wakeups.put(None)

    @property
    def is_fresh(self) -> bool:
        """Whether the last answer is too recent to query again."""
        return time.monotonic() - self._asked_at <= LEAST_POLL_S

    def asked(self) -> None:
        """Note a query; the next one is due at the usual time."""
        self._asked_at = time.monotonic()
        self._due_at = self._asked_at + self._every_s

    def postpone(self) -> None:
        """Delay the next query: the engine needs a moment to show what was just submitted."""
        self._due_at = time.monotonic() + LEAST_POLL_S

    def hold_off(self) -> None:
        """Delay the next query until the minimum pause is over."""
        self._due_at = max(self._due_at, self._asked_at + LEAST_POLL_S)

    def hurry(self) -> None:
        """Query as soon as allowed."""
        self._due_at = min(self._due_at, self._asked_at + LEAST_POLL_S)

    def unanswered(self, why: object) -> None:
        """Report, once, that the engine does not answer."""
        if not self._is_silent:
            self._say(f"{why}; retrying; its runs continue meanwhile")
        self._is_silent = True

    def answered(self) -> None:
        """Report that the engine answers again, if it was silent."""
        if self._is_silent:
            self._say(f"{self._engine} answers again")
        self._is_silent = False
