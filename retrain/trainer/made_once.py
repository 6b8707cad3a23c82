"""What one run of a campaign makes for all that need it; if its maker is killed, another makes it."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from retrain.base.locks import hold

T = TypeVar("T")

POLL_S = 0.2


@contextmanager
def made_once(
    lock_file: Path,
    read: Callable[[], T | None],
    stop: threading.Event,
    waiting: Callable[[], None],
    longest_s: float = math.inf,
) -> Iterator[T | None]:
    """Return a context with what another run made, or None, in which this run is to make it.

    While another one makes it, this one waits: until a stop, for `longest_s`, or until it can take over.
    """
    until_s, lock = time.monotonic() + longest_s, None
    made = read()
    while made is None and time.monotonic() < until_s and not stop.is_set():
        if (lock := hold(lock_file)) is not None:
            if os.environ.get("RETRAIN_JOB"):  # other runs may be on other machines
                lock.renew()
            made = read()  # of who held the lock
            break
        waiting()
        stop.wait(POLL_S)
        made = read()
    try:
        yield made
    finally:
        if lock is not None:
            lock.release()
