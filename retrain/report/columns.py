"""A run's rows as columns: what a campaign of a thousand runs still has room for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retrain.errors import RecordsError
from retrain.records.layout import RunFiles
from retrain.records.lines import Row
from retrain.records.metrics import MetricsScan, scan_metrics, scan_rows

FloatArray = NDArray[np.float64]

MOST_METRICS = 200  # rows of ours have at most sixty; a damaged file must not make millions of columns
LARGEST = 1e100  # nothing measured is larger, and sums of squares must not overflow
NOT_METRICS = frozenset({"step", "seed", "attempt"})


@dataclass(frozen=True)
class Columns:
    """One run's rows, each step once.

    Attributes:
        steps: step numbers, ascending, shape (rows,).
        ends_s: when each step's row was written, in Unix seconds; NaN where it does not say.
        metrics: name -> values, shape (rows,); NaN where a row has none.
        regimes: the regime of each row, "" where it has none.
        skipped_lines: lines that were torn or are no rows.
    """

    steps: NDArray[np.int64]
    ends_s: FloatArray
    metrics: dict[str, FloatArray]
    regimes: tuple[str, ...]
    skipped_lines: int

    def metric(self, name: str) -> FloatArray:
        """Give a metric's values, all NaN if no row has it."""
        found = self.metrics.get(name)
        return np.full(len(self.steps), np.nan) if found is None else found


NO_ROWS = Columns(np.empty(0, dtype=np.int64), np.empty(0), {}, (), 0)


def read_columns(run_dir: Path) -> Columns:
    """Read a run's metrics; a run without rows has no columns.

    Raises:
        RecordsError: the file cannot be read.
    """
    return _columns(scan_metrics(run_dir))


def read_warm_up(run_dir: Path) -> Columns:
    """Read a run's supervised updates in the same way; a file that cannot be read has none.

    They are a side note, and what is wrong with a run's directory is said of its rows.
    """
    try:
        return _columns(scan_rows(RunFiles(run_dir).warmup))
    except RecordsError:
        return NO_ROWS


def _columns(scan: MetricsScan) -> Columns:
    names = _names(scan.rows)
    return Columns(
        steps=np.array([min(row["step"], 2**62) for row in scan.rows], dtype=np.int64),
        ends_s=np.array([unix_seconds(row.get("timestamp")) for row in scan.rows], dtype=float),
        metrics={name: np.array([number(row.get(name)) for row in scan.rows]) for name in names},
        regimes=tuple(str(row.get("bp_regime") or "") for row in scan.rows),
        skipped_lines=scan.skipped_lines,
    )


def number(value: object) -> float:
    """Give a number as a float, NaN for anything that cannot be a measurement."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST <= value <= LARGEST:
        return float("nan")
    return float(value)


def unix_seconds(timestamp: object) -> float:
    """Read a timestamp of the records, NaN if it is none."""
    try:
        return datetime.fromisoformat(str(timestamp)).timestamp()
    except (ValueError, OverflowError):
        return float("nan")


def _names(rows: Sequence[Row]) -> Iterable[str]:
    names: dict[str, None] = {}
    for row in rows:
        for name, value in row.items():
            if name not in names and name not in NOT_METRICS and number(value) == number(value):
                names[name] = None
        if len(names) >= MOST_METRICS:
            break
    return names
