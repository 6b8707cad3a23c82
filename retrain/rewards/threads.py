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
        self._before = 0  # completions of earlier calls of `map`
        self._futures: Sequence[Future[Any]] = ()

    @property
    def scored(self) -> int:
        """How many completions are done, of all calls together; from any thread."""
        return self._before + sum(future.done() for future in self._futures)

    def map(self, function: Callable[[Answer], T], answers: Sequence[Answer]) -> list[T]:
        """Return the results in the answers' order; after an exception, calls that wait are dropped."""
        self._futures = futures = [self._threads.submit(function, answer) for answer in answers]
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            self._futures, self._before = (), self._before + len(futures)

    def close(self, *, wait: bool = False) -> None:
        """Drop the calls that wait; `wait` until the others have ended."""
        self._threads.shutdown(wait=wait, cancel_futures=True)
