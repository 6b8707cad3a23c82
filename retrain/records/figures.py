"""Averages of a few numbers, and a run's pace from the ends of its records: cheap enough for every run.

Importing the standard library's `statistics` takes 10 ms, too long for `status`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from retrain.clock import posix_s, seconds_between
from retrain.records.attempts import Attempt
from retrain.records.lines import Row, number_in
from retrain.records.metrics import MetricsEnds

PACE_KEYS = ("attempt", "timestamp", "step_time_s")  # of the rows that `pace_of` reads


def mean(values: Iterable[float | None]) -> float | None:
    """Return the arithmetic mean of the values that are not None."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    try:
        return math.fsum(known) / len(known)
    except OverflowError:  # huge numbers in a damaged file must not cause a failure
        return sum(value / len(known) for value in known)


def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None."""
    ordered = sorted(value for value in values if value is not None)
    return mean(ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1])


def sample_std(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation (divided by n - 1); None for fewer than two values."""
    centre = mean(values)
    if centre is None or len(values) < 2:
        return None
    return math.hypot(*(value - centre for value in values)) / math.sqrt(len(values) - 1)


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a run takes its steps."""

    steps: int  # measured
    step_s: float  # mean, including the time between steps
    recent_s: tuple[float, ...]  # times of the last steps alone
    startup_s: float | None
    since_s: float | None = None  # start and end of the measurement, in seconds since 1970
    until_s: float | None = None


def pace_of(ends: MetricsEnds, attempts: Sequence[Attempt]) -> Pace | None:
    """Return a run's pace from the first and the last rows (with `PACE_KEYS`); None before a whole step."""
    recent = tuple(s for row in ends.last if (s := number_in(row, "step_time_s")) is not None and s >= 0)
    first = ends.first
    if not recent or first is None:
        return None
    steps, took_s = len(recent), math.fsum(recent)
    last = ends.last[-1]
    until_s = posix_s(last.get("timestamp"))
    since = int(last["step"]) - int(number_in(first, "step") or 0)
    whole_s = seconds_between(first.get("timestamp"), last.get("timestamp"))
    if since > 0 and whole_s is not None and first.get("attempt") == last.get("attempt"):
        steps, took_s = since, whole_s  # including the time between steps
    since_s = until_s - took_s if until_s is not None else None
    return Pace(steps, took_s / steps, recent, _startup_s(first, attempts, recent), since_s, until_s)


def _startup_s(first: Row, attempts: Sequence[Attempt], recent_s: Sequence[float]) -> float | None:
    if not attempts or first.get("attempt") != attempts[0].number:
        return None
    whole_s = seconds_between(attempts[0].started_at, first.get("timestamp"))
    return max(0.0, whole_s - sorted(recent_s)[len(recent_s) // 2]) if whole_s is not None else None
