"""Threads that score completions, and count those that are done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from retrain.rewards import Answer
from retrain.system import cpu_capacity

T = TypeVar("T")


class ScoringThreads:
    """Call a function on several completions at a time."""

    def __init__(self, count: int, name: str) -> None:
        """Start no thread yet; `count` 0 is one per core."""
        self.count = count or max(1, round(cpu_capacity()))
        self._threads = ThreadPoolExecutor(self.count, name)
        # completions of earlier calls of `map`, and those of this one: together, or `scored` could fall
        self._calls: tuple[int, Sequence[Future[Any]]] = (0, ())

    @property
    def scored(self) -> int:
        """How many completions are done, of all calls together; from any thread."""
        before, futures = self._calls
        return before + _done(futures)

    def map(self, function: Callable[[Answer], T], answers: Sequence[Answer]) -> list[T]:
        """Return the results in the answers' order; after an exception, calls that wait are dropped."""
        before, _ = self._calls
        futures = [self._threads.submit(function, answer) for answer in answers]
        self._calls = before, futures
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            self._calls = before + _done(futures), ()

    def close(self, *, wait: bool = False) -> None:
        """Drop the calls that wait; `wait` until the others have ended."""
        self._threads.shutdown(wait=wait, cancel_futures=True)


def _done(futures: Sequence[Future[Any]]) -> int:
    return sum(future.done() and not future.cancelled() for future in futures)
