"""How far calls of sampling are, told to an observer now and then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from retrain.backends import SamplingProgress


class Drawing(Protocol):
    """A completion in progress."""

    @property
    def tokens(self) -> Sequence[int]: ...
    @property
    def is_done(self) -> bool: ...


Tell = Callable[[Sequence[Drawing]], None]


class Progress:
    """Sums up the calls that are in progress, which may be in several threads."""

    def __init__(self, observe: Callable[[SamplingProgress], None], every_s: float = 0.5) -> None:
        self._observe, self._every_s = observe, every_s
        self._lock = threading.Lock()
        self._calls: dict[object, tuple[float, Sequence[Drawing]]] = {}  # when each began, and its rows
        self._told_s = time.monotonic()

    def is_busy(self) -> bool:
        """Whether a call has begun and not ended."""
        return bool(self._calls)

    @contextmanager
    def call(self) -> Iterator[Tell]:
        """Return what tells the rows of a call, as often as it likes, until the call ends."""
        call, began_s = object(), time.monotonic()
        with self._lock:
            self._calls[call] = (began_s, ())

        def tell(rows: Sequence[Drawing]) -> None:
            now_s = time.monotonic()
            with self._lock:
                self._calls[call] = (began_s, rows)
                if now_s - self._told_s >= self._every_s:
                    self._told_s = now_s
                    self._observe(self._summary(now_s))

        try:
            yield tell
        finally:
            with self._lock:
                self._calls.pop(call, None)

    def _summary(self, now_s: float) -> SamplingProgress:
        rows = [row for _, rows in self._calls.values() for row in rows]
        lengths, finished = [len(row.tokens) for row in rows], sum(row.is_done for row in rows)
        first_s = min(began_s for began_s, _ in self._calls.values())
        return SamplingProgress(len(lengths), finished, sum(lengths), max(lengths), now_s - first_s)
