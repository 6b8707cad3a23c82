"""The one place where threads wait: a condition that measures waits and wakes waiters when closed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from retrain.errors import RetrainError


class ClosedError(RetrainError):
    """The limiter or pipeline was closed before or during a wait."""


class Monitor:
    """A lock with a condition. Hold it (`with monitor:`) around every other method."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_closed = False
        self._condition = threading.Condition()
        self._clock = clock

    def __enter__(self) -> None:
        self._condition.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._condition.release()

    def wait_until(self, is_ready: Callable[[], bool], timeout_s: float | None, awaited: str) -> float:
        """Wait until `is_ready()`, checked again after every `wake`; return the seconds waited.

        Raises:
            ClosedError: closed before it was ready.
            TimeoutError: not ready within `timeout_s`.
        """
        start = self._clock()
        self._condition.wait_for(lambda: self.is_closed or is_ready(), timeout_s)
        if self.is_closed:
            raise ClosedError(f"closed while waiting for {awaited}")
        if not is_ready():
            raise TimeoutError(
                f"waited {timeout_s} s for {awaited}; raise timeout_s, or check that the other side runs"
            )
        return self._clock() - start

    def wake(self) -> None:
        """Make every waiter check again."""
        self._condition.notify_all()

    def close(self) -> None:
        """Raise `ClosedError` in every present and future waiter."""
        self.is_closed = True
        self.wake()
