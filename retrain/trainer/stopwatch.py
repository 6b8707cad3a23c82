"""How long a step and its parts took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from retrain.records.step_row import Timing
from retrain.trainer.journal import Journal


class Stopwatch:
    """Times one step and its parts."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> Stopwatch:
        """Begin a step."""
        self._started = time.perf_counter()
        self._parts_s: dict[str, float] = {}
        return self

    @contextmanager
    def part(self, name: str, journal: Journal, step: int) -> Iterator[None]:
        """Time a part of the step, and say in status.json that it goes on."""
        journal.phase(name, step)
        started = time.perf_counter()
        yield
        self._parts_s[f"{name}_time_s"] = time.perf_counter() - started

    def timing(self) -> Timing:
        """Return the seconds since the step began, never zero, and those of its parts."""
        return Timing(step_time_s=max(time.perf_counter() - self._started, 1e-9), **self._parts_s)
