"""Reads a run's rows as columns, small enough in memory for a campaign of a thousand runs."""

from __future__ import annotations

import math
import sys
from array import array
from bisect import bisect_left
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retrain.clock import posix_s
from retrain.records.lines import Row, parse_line, read_lines
from retrain.records.metrics import is_step

FloatArray = NDArray[np.float64]

MOST_METRICS = 200  # our rows have at most sixty; a damaged file must not make millions of columns
LARGEST = 1e100  # no measurement is larger, and sums of squares must not overflow
NOT_METRICS = frozenset({"step", "seed", "attempt"})


@dataclass(frozen=True)
class Columns:
    """One run's rows, each step once."""

    steps: NDArray[np.int64]  # ascending, shape (rows,)
    ends_s: FloatArray  # when each step's row was written, in Unix seconds; NaN if unknown
    metrics: dict[str, FloatArray]  # name -> values, shape (rows,); NaN where a row lacks it
    regimes: tuple[str, ...]  # of each row; "" if none
    skipped_lines: int  # torn, or not rows

    def metric(self, name: str) -> FloatArray:
        """Return a metric's values, all NaN if no row has it."""
        found = self.metrics.get(name)
        return np.full(len(self.steps), np.nan) if found is None else found


NO_ROWS = Columns(np.empty(0, dtype=np.int64), np.empty(0), {}, (), 0)


def read_columns(path: Path) -> Columns:
    """Read a file of rows, such as metrics.jsonl or warmup.jsonl; without rows, there are no columns.

    Raises:
        RecordsError: the file cannot be read.
    """
    reading = _Reading()
    for line in read_lines(path):
        row = parse_line(line)
        if row is not None and is_step(step := row.get("step")):
            reading.add(step, row)
        else:
            reading.skipped_lines += 1
    return reading.columns()


class _Reading:
    """Collects rows one at a time: as dictionaries they would need ten times the memory."""

    def __init__(self) -> None:
        self.skipped_lines = 0
        self._steps = array("q")
        self._ends_s = array("d")
        self._regimes: list[str] = []
        self._metrics: dict[str, array[float]] = {}  # may be shorter than the steps: the rest is unknown

    def add(self, step: int, row: Row) -> None:
        """Add a row; it replaces all rows from its step on."""
        if self._steps and self._steps[-1] >= step:
            since = bisect_left(self._steps, step)
            del self._steps[since:], self._ends_s[since:], self._regimes[since:]
            for metric in self._metrics.values():
                del metric[since:]
        rows = len(self._steps)
        self._steps.append(step)
        self._ends_s.append(unix_seconds(row.get("timestamp")))
        self._regimes.append(sys.intern(str(row.get("bp_regime") or "")))
        for name, value in row.items():
            self._add_value(name, number(value), rows)

    def _add_value(self, name: str, value: float, rows: int) -> None:
        metric = self._metrics.get(name)
        if metric is None:
            if value != value or name in NOT_METRICS or len(self._metrics) >= MOST_METRICS:
                return
            metric = self._metrics[name] = array("d")
        metric.extend(repeat(math.nan, rows - len(metric)))
        metric.append(value)

    def columns(self) -> Columns:
        """Return the columns, without metrics that only replaced rows had."""
        metrics: dict[str, FloatArray] = {}
        for name in list(self._metrics):
            metric = self._metrics.pop(name)  # freed one by one
            metric.extend(repeat(math.nan, len(self._steps) - len(metric)))
            values = np.frombuffer(metric, dtype=np.float64)
            if not np.isnan(values).all():
                is_constant = (values == values[0]).all()  # as many metrics are, which then need no room
                metrics[name] = np.broadcast_to(values[0], values.shape) if is_constant else values.copy()
        steps, ends_s = np.array(self._steps, dtype=np.int64), np.array(self._ends_s, dtype=np.float64)
        return Columns(steps, ends_s, metrics, tuple(self._regimes), self.skipped_lines)


def number(value: object) -> float:
    """Return a number as a float; NaN if it cannot be a measurement."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST <= value <= LARGEST:
        return float("nan")
    return float(value)


def rounded(value: float) -> float | None:
    """Return four significant digits, enough for a plot; None if not finite."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def unix_seconds(timestamp: object) -> float:
    """Return a timestamp of the records in Unix seconds; NaN if it is invalid."""
    found = posix_s(timestamp)
    return math.nan if found is None else found
