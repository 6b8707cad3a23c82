"""Scorers that score several completions at a time, each in a thread, and count those that are done."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from retrain.control.machine import programs_at_once
from retrain.plugins.rewards import Answer, BatchScorer, Score


class ThreadedScorer(BatchScorer):
    """Each kind defines `score_one`."""

    uses_all_cores = True

    def __init__(self, count: int, name: str) -> None:
        """Start no thread yet; `count` 0 is one per core."""
        self.count = programs_at_once(count)
        self._threads = ThreadPoolExecutor(self.count, name)
        # completions of earlier calls, and those of this one: together, or `scored` could fall
        self._calls: tuple[int, Sequence[Future[Score]]] = (0, ())

    @property
    def scored(self) -> int:
        before, futures = self._calls
        return before + _done(futures)

    def score_all(self, answers: Sequence[Answer]) -> list[Score]:
        """Score every completion, in order; after an exception, those that wait are dropped."""
        before, _ = self._calls
        futures = [self._threads.submit(self.score_one, answer) for answer in answers]
        self._calls = before, futures
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            self._calls = before + _done(futures), ()

    def score_one(self, answer: Answer) -> Score:
        """Score a completion; called by several threads."""
        raise NotImplementedError

    def close(self) -> None:
        """Drop the completions that wait; safe to call twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _done(futures: Sequence[Future[Score]]) -> int:
    return sum(future.done() and not future.cancelled() for future in futures)
