"""Waiting for what happens in other processes: for as short as possible, and never for ever."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 900.0  # a busy machine starts a Ray in more than a minute, and runs take as long


def await_that(
    what: str, is_so: Callable[[], object], patience_s: float = PATIENCE_S, every_s: float = 0.25
) -> None:
    """Wait for something that happens elsewhere, looking again and again.

    Raises:
        TimeoutError: it did not happen.
    """
    until = time.monotonic() + patience_s
    while not is_so():
        if time.monotonic() > until:
            raise TimeoutError(f"{what}: not within {patience_s:g} s")
        time.sleep(every_s)
