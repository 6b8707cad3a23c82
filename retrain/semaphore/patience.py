"""How long a waiter waits: for ever, until a time, or until another thread gives it up."""

from __future__ import annotations

import math
import threading
import time


class Patience:
    """One waiter's."""

    def __init__(self, timeout_s: float | None, *, may_give_up: bool = False) -> None:
        """Start the clock.

        Args:
            timeout_s: how long at most; None is for ever.
            may_give_up: `give_up` may be called.
        """
        self._until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self.is_endless = math.isinf(self._until) and not may_give_up
        self._is_over = False
        self.wake = threading.Event()  # set by what is waited for, and by `give_up`

    def give_up(self) -> None:
        """End the wait soon; safe to call at any time, from any thread."""
        self._is_over = True
        self.wake.set()

    def left_s(self) -> float:
        """Return the seconds left, 0 or less if it is over, infinite without a limit."""
        return 0.0 if self._is_over else self._until - time.monotonic()

    def wait(self) -> None:
        """Sleep until `wake` is set or the time is over."""
        left_s = self.left_s()
        self.wake.wait(None if math.isinf(left_s) else max(0.0, left_s))
