"""Interrupts a call in this process that takes too long."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupted_after(limit_s: float, said: str) -> Iterator[None]:
    """Raise TimeoutError in what takes longer, even if it waits for something.

    A signal does it, which only the main thread hears; elsewhere, and where somebody already has a timer
    running, there is no limit. Code in C that never looks for signals is not interrupted.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return

    def interrupt(*_: object) -> None:
        raise TimeoutError(said)

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)
