"""When an engine is asked what became of its tasks, and what is said while it does not answer.

One question answers for all runs. It comes every `poll_seconds`, and never sooner than two seconds
after the one before, whatever happens.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable

LEAST_POLL_S = 2.0  # between two questions


class Asking:
    """The clock of one launcher's questions."""

    def __init__(self, engine: str, every_s: float, say: Callable[[str], None]) -> None:
        """Begin: the first question is due at once.

        Args:
            engine: its name, for what is said.
            every_s: usual time between two questions.
            say: tells whoever watches.
        """
        self._engine = engine
        self._every_s = every_s
        self._say = say
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._asked_at = float("-inf")
        self._due_at = float("-inf")
        self._is_silent = False

    def wait(self, timeout_s: float) -> bool:
        """Wait until a question is due, `wake` is called, or the time is over; tell whether one is due."""
        wait_s = min(timeout_s, self._due_at - time.monotonic())
        if wait_s > 0:
            self.rest(wait_s)
        return time.monotonic() >= self._due_at

    def rest(self, seconds: float) -> bool:
        """Wait so long, or until `wake` is called; tell whether it was."""
        try:
            self._bell.get(timeout=seconds)
        except queue.Empty:
            return False
        return True

    def wake(self) -> None:
        """Make `wait` and `rest` return; callable from a signal handler."""
        self._bell.put(None)

    @property
    def is_fresh(self) -> bool:
        """Whether the last answer is too young to ask again."""
        return time.monotonic() - self._asked_at <= LEAST_POLL_S

    def asked(self) -> None:
        """A question has just been asked; the next one is due at the usual time."""
        self._asked_at = time.monotonic()
        self._due_at = self._asked_at + self._every_s

    def postpone(self) -> None:
        """Something was submitted just now, which the engine needs a moment to show."""
        self._due_at = time.monotonic() + LEAST_POLL_S

    def hold_off(self) -> None:
        """Do not ask sooner than allowed."""
        self._due_at = max(self._due_at, self._asked_at + LEAST_POLL_S)

    def hurry(self) -> None:
        """Something is wanted: ask as soon as allowed."""
        self._due_at = min(self._due_at, self._asked_at + LEAST_POLL_S)

    def unanswered(self, why: object) -> None:
        """The engine did not answer: say so, once."""
        if not self._is_silent:
            self._say(f"{why}; it is asked again and again, and what it was given is looked after then")
        self._is_silent = True

    def answered(self) -> None:
        """The engine answered: say so if it had fallen silent."""
        if self._is_silent:
            self._say(f"{self._engine} answers again")
        self._is_silent = False
