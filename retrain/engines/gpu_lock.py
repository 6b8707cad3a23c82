"""A lock of processes that share a GPU with a server: all sample at the same time, or one trains alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from retrain.locks import LockFile

LOOK_S = 0.02


class GpuLock:
    """A lock in a file, shared by those who sample; each of them trains before it samples again."""

    def __init__(self, path: Path | None) -> None:
        """Use a file; without one, nobody waits for anybody."""
        self._path = path

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Wait until nobody trains, and keep it so while the body runs."""
        yield from self._hold(shared=True)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Wait until nobody else samples or trains, and keep it so while the body runs."""
        yield from self._hold(shared=False)

    def _hold(self, *, shared: bool) -> Iterator[None]:
        if self._path is None:
            yield
            return
        lock = LockFile(str(self._path))
        try:
            while not lock.try_lock(shared=shared):
                time.sleep(LOOK_S)
            yield
        finally:
            lock.close()
