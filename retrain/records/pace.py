"""How fast a run takes its steps, from the first, the middle and the last rows of its metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from retrain.base.clock import posix_s, seconds_between
from retrain.records.lines import Row, number_in
from retrain.records.metrics import MetricsEnds
from retrain.records.run_state import Attempt

PAUSES = ("api_pause_s", "api_pauses_s")
PACE_KEYS = ("attempt", "timestamp", "step_time_s", *PAUSES)  # of the rows that `pace_of` reads


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a run takes its steps."""

    steps: int  # measured
    step_s: float  # mean, including the time between steps
    recent_s: tuple[float, ...]  # times of the last steps alone
    startup_s: float | None
    since_s: float | None = None  # start and end of the measurement, in seconds since 1970
    until_s: float | None = None
    late_s: float | None = None  # mean step time since the middle, in the same attempt, as `step_s`
    middle_s: float | None = None  # its time, in seconds since 1970

    @property
    def late_steps(self) -> float:
        """The steps behind `late_s`; 0 if the middle is not known."""
        if self.late_s is None or self.middle_s is None or self.until_s is None or self.late_s <= 0:
            return 0.0
        return max(0.0, (self.until_s - self.middle_s) / self.late_s)


def pace_of(ends: MetricsEnds, attempts: Sequence[Attempt]) -> Pace | None:
    """Return a run's pace from the first and the last rows (with `PACE_KEYS`); None before a whole step."""
    recent = tuple(s for row in ends.last if (s := active_s(row)) is not None and s >= 0)
    first = ends.first
    if not recent or first is None:
        return None
    steps, took_s = len(recent), math.fsum(recent)
    last = ends.last[-1]
    until_s = posix_s(last.get("timestamp"))
    since = int(last["step"]) - int(number_in(first, "step") or 0)
    whole_s = seconds_between(first.get("timestamp"), last.get("timestamp"))
    whole_s = whole_s and whole_s - paused_between_s(first, last)  # with the time between steps
    # less than 0 where the clock was set back meanwhile
    if since > 0 and whole_s is not None and whole_s >= 0 and first.get("attempt") == last.get("attempt"):
        steps, took_s = since, whole_s
    since_s = until_s - took_s if until_s is not None else None
    startup_s = _startup_s(first, attempts, recent)
    return Pace(steps, took_s / steps, recent, startup_s, since_s, until_s, *_late(ends))


def _late(ends: MetricsEnds) -> tuple[float, float] | tuple[None, None]:
    """Return the mean step time since the middle, and when that was; None where they are not known."""
    middle, last = ends.middle, ends.last[-1]
    if middle is None or middle.get("attempt") != last.get("attempt"):
        return None, None
    whole_s = seconds_between(middle.get("timestamp"), last.get("timestamp"))
    took_s = whole_s and whole_s - paused_between_s(middle, last)
    middle_s, steps = posix_s(middle.get("timestamp")), int(last["step"]) - int(middle["step"])
    if took_s is None or took_s <= 0 or middle_s is None or not 0 < steps < int(last["step"]):
        return None, None
    return took_s / steps, middle_s


def _startup_s(first: Row, attempts: Sequence[Attempt], recent_s: Sequence[float]) -> float | None:
    if not attempts or first.get("attempt") != attempts[0].number:
        return None
    whole_s = seconds_between(attempts[0].started_at, first.get("timestamp"))
    if whole_s is None:
        return None
    return max(0.0, whole_s - (number_in(first, PAUSES[1]) or 0.0) - sorted(recent_s)[len(recent_s) // 2])


def active_s(row: Row) -> float | None:
    """Return a step's time without pauses of its API; None if it is not known."""
    step_s = number_in(row, "step_time_s")
    return step_s and max(step_s - max(0.0, number_in(row, PAUSES[0]) or 0.0), 0.01 * step_s)


def paused_between_s(first: Row, last: Row) -> float:
    """Return the pauses of the API between the ends of two steps of an attempt."""
    ends = number_in(first, PAUSES[1]), number_in(last, PAUSES[1])
    return max(0.0, (ends[1] or 0.0) - (ends[0] or 0.0))
