"""Runs that wait for their next attempt, each with a delay that doubles and is spread at random."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

from retrain.plan.matrix import RunPlan

FIRST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0


@dataclass(frozen=True)
class Retry:
    """A run that waits for its next attempt."""

    run: RunPlan
    due: float  # of time.monotonic


class RetryQueue:
    """All of them."""

    def __init__(self) -> None:
        self._waiting: list[Retry] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, run: RunPlan, tries: int) -> float:
        """Let a run wait after so many tries; gives the seconds."""
        doubled = FIRST_RETRY_S * 2.0 ** max(0, tries - 1)
        delay_s = min(LONGEST_RETRY_S, doubled) * random.uniform(0.5, 1.5)
        self._waiting.append(Retry(run, time.monotonic() + delay_s))
        return delay_s

    def pop_due(self) -> RunPlan | None:
        """Return the run whose time came first, if it has come."""
        due = min(self._waiting, key=lambda retry: retry.due, default=None)
        if due is None or due.due > time.monotonic():
            return None
        self._waiting.remove(due)
        return due.run

    def dues(self) -> Iterator[float]:
        """When each is due, on the monotonic clock."""
        return (retry.due for retry in self._waiting)
