"""The right to call the API, and how long the run waited for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from retrain.semaphore import FileSemaphore


class PermitGate:
    """Hands out the campaign's permits and adds up the time that this run waited for them."""

    def __init__(self, directory: Path, permits: int, label: str) -> None:
        self._open: Callable[[], FileSemaphore] = lambda: FileSemaphore(directory, permits, label)
        self._semaphore: FileSemaphore | None = None
        self._lock = threading.Lock()
        self._waited_s = 0.0

    @contextmanager
    def permit(self) -> Iterator[None]:
        """Hold one permit; blocks until there is one."""
        semaphore = self._get()
        asked = time.perf_counter()
        with semaphore:
            with self._lock:
                self._waited_s += time.perf_counter() - asked
            yield

    def take_waited_s(self) -> float:
        """Give the seconds waited since this was last asked, over all calls."""
        with self._lock:
            waited, self._waited_s = self._waited_s, 0.0
        return waited

    def _get(self) -> FileSemaphore:
        with self._lock:
            if self._semaphore is None:
                self._semaphore = self._open()
            return self._semaphore
