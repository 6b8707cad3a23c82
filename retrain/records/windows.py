"""Over which part of a run a metric is averaged: a window of its steps, tokens, rollouts, seconds or dollars.

A run's rows tell how much of each axis it has come to. A row counts by the share of the window that its step
covers: a step that spends twice as much counts twice on an axis of what was spent, and one that straddles a
bound counts by its part inside. Held-out values are measured at the ends of steps, and count once each.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, repeat
from typing import Any

from retrain.base.errors import ConfigError
from retrain.records.text import plain

LAST_FRACTION = 0.1  # of the steps: enough to average out noise, few enough that learning has mostly ended
FEWEST_STEPS = 10
STEPS = "steps"
WHOLE, LAST = "whole", "last"
BOUNDS_SHOWN_WHOLE = 100  # from here on without decimals


@dataclass(frozen=True)
class Axis:
    """What a run has come to after each of its steps."""

    unit: str
    keys: tuple[str, ...]  # of a row, from which its amount is computed; the first must be known
    amount: Callable[..., float]  # of a row's values, NaN where they are not known
    remedy: str = "its rows are of another version"


def without_pauses(step_s: float, pause_s: float) -> float:
    """Return a step's time without pauses of its API, which may be NaN for none."""
    return max(step_s - max(0.0, pause_s), 0.01 * step_s) if pause_s > 0 else step_s


def _rollouts(prompts: float, group_size: float, dropped: float) -> float:
    return (prompts + (dropped if dropped > 0 else 0.0)) * group_size


AXES = {
    STEPS: Axis("steps", (), float),
    "tokens": Axis("sampled tokens", ("tokens_per_step",), float),
    "rollouts": Axis("rollouts", ("batch_size", "group_size", "refill_dropped"), _rollouts),
    "seconds": Axis("seconds of steps", ("step_time_s", "api_pause_s"), without_pauses),
    "usd": Axis("dollars", ("cost_usd",), float, "its tokens have no price; [budget.prices] sets one"),
}


def amounts(steps: Sequence[float], values: Iterable[Sequence[Any]], per: str) -> Sequence[float] | None:
    """Return how much of an axis a run has come to after each row; None if a row does not tell.

    Args:
        steps: the rows' steps, ascending.
        values: for each of the axis's keys the rows' values, NaN where a row has none.
    """
    if per == STEPS:
        return steps
    spent = list(map(AXES[per].amount, *values))
    return list(accumulate(spent)) if all(0 <= amount < math.inf for amount in spent) else None


def steps_averaged(end: int) -> int:
    """Return over how many of its last steps a run's value is averaged, if it ended after `end`."""
    return max(FEWEST_STEPS, round(LAST_FRACTION * end))


def late_rows(rows: Sequence[dict[str, Any]], end: int) -> list[dict[str, Any]]:
    """Return the rows that a run's value is a mean of, if it ended after `end` steps."""
    return [row for row in rows if row["step"] > end - steps_averaged(end)]


@dataclass(frozen=True)
class Window:
    """From where to where on which axis; by default the last tenth of a run's steps, at least ten."""

    per: str = STEPS
    start: float | None = None  # exclusive; None: a tenth before the end
    end: float | None = None  # inclusive; None: where each run ends
    last: int = 0  # how many steps before the end it begins, where no start is given; 0: a tenth

    @property
    def is_last(self) -> bool:
        """Whether it is the last part of a run's steps, however long the run is."""
        return self.start is None and self.per == STEPS

    def bounds(self, reach: float) -> tuple[float, float]:
        """Return where it begins and ends in a run that comes to `reach`."""
        end = reach if self.end is None else self.end
        if self.start is not None:
            return self.start, end
        length = (self.last or steps_averaged(int(end))) if self.per == STEPS else LAST_FRACTION * end
        return end - length, end

    def covered(self, ends: Sequence[float]) -> tuple[slice, list[float] | None]:
        """Return the rows inside, and how much of the axis each covers there; None: equally much.

        Args:
            ends: how much of the axis the run has come to after each row (`amounts`).
        """
        start, end = self.bounds(ends[-1] if len(ends) else 0.0)
        if self.per == STEPS and start == int(start) and end == int(end):
            return slice(bisect_right(ends, start), bisect_right(ends, end)), None
        first, stop = bisect_right(ends, start), min(bisect_left(ends, end) + 1, len(ends))
        begins = [ends[i] - 1 if self.per == STEPS else ends[i - 1] if i else 0.0 for i in range(first, stop)]
        sizes = [
            min(float(after), end) - max(float(before), start)
            for before, after in zip(begins, ends[first:stop], strict=True)
        ]
        return slice(first, stop), [max(0.0, size) for size in sizes]

    def mean(self, ends: Sequence[float], values: Sequence[float]) -> float | None:
        """Return the mean of the values of a run's rows, NaN where unknown; None without one inside."""
        inside, shares = self.covered(ends)
        weighted = zip(values[inside], shares or repeat(1.0), strict=False)
        known = [(value, share) for value, share in weighted if not math.isnan(value)]
        total = math.fsum(share for _, share in known)
        return math.fsum(value * share for value, share in known) / total if total else None

    def placed(self, ends: Sequence[float]) -> Sequence[float]:
        """Return where evaluations after each row count: after the step that passes the end, there.

        So a run that goes on has the value of one that ends with that step.
        """
        if self.end is None or (passing := bisect_left(ends, self.end)) == len(ends):
            return ends
        return [*ends[:passing], self.end, *ends[passing + 1 :]]

    def evaluations(self, ends: Sequence[float], rows: Sequence[int]) -> list[int]:
        """Return which evaluations count: those inside, or the last one before its end if none is.

        Of the last part of a run that is the last one alone.

        Args:
            ends: how much of the axis the run has come to after each row.
            rows: after which evaluations were made, ascending.
        """
        placed = self.placed(ends)
        at = [placed[row] for row in rows]
        start, end = self.bounds(ends[-1] if at else 0.0)
        first, stop = bisect_right(at, start), bisect_right(at, end)
        return list(rows[max(0, stop - 1) if self.is_last or first == stop else first : stop])

    def among(self, reaches: Mapping[str, float]) -> tuple[Window, str]:
        """Return the part of it that all runs come to, and what is cut off, as a sentence.

        Runs are compared at equal amounts; only the last steps of each run are its own.

        Args:
            reaches: how far each run comes that is over, by its name.
        """
        if not reaches:
            return self, ""
        shortest = min(reaches, key=reaches.__getitem__)
        least, most = reaches[shortest], max(reaches.values())
        end = least if self.end is None else min(self.end, least)
        start, unit = self.bounds(end)[0], AXES[self.per].unit
        if start >= end:
            raise ConfigError(
                f"--over: {plain(shortest)} ends at {amount(end)} {unit}, before the window of {self} "
                "begins; choose one that begins before the shortest run ends, or name other runs"
            )
        cut_off = ""
        if self.end is not None and end < self.end:
            short = sum(reach < self.end for reach in reaches.values())
            cut_off = f"{short} of {len(reaches)} finished runs end before {amount(self.end)} {unit}"
        elif self.end is None and most > least:
            cut_off = f"finished runs end at {amount(least)} to {amount(most)} {unit}"
        if cut_off:
            cut_off += f": all are compared up to {amount(end)}, where {plain(shortest)} ends"
        return replace(self, start=start, end=end), cut_off

    def __str__(self) -> str:
        """Return it in words."""
        unit = AXES[self.per].unit
        if self.start is None:
            until = "" if self.end is None else f" up to {amount(self.end)}"
            return f"the last {self.last or 'tenth of'} {unit}{until}"
        if self.end is None:
            return f"{unit} from {amount(self.start)} on" if self.start else f"all {unit} of a run"
        if self.per == STEPS and self.start == int(self.start):
            return f"steps {amount(self.start + 1)} to {amount(self.end)}"
        if not self.start:
            return f"the first {amount(self.end)} {unit}"
        return f"{amount(self.start)} to {amount(self.end)} {unit}"


def amount(value: float) -> str:
    """Return an amount of an axis, to print."""
    return f"{value:,.0f}" if value >= BOUNDS_SHOWN_WHOLE or value == int(value) else f"{value:.4g}"


def read_window(per: str, over: str | Sequence[float]) -> Window:
    """Return the window that two keys or options say: `over` is "whole", "last" or two amounts, as `0:2e6`.

    Of steps both amounts are included.
    """
    if per not in AXES:
        raise ConfigError(f"--per {plain(per)}: no such axis; there are {', '.join(AXES)}")
    if over == LAST:
        return Window(per)
    if over == WHOLE:
        return Window(per, start=0.0)
    try:
        start, end = map(float, over.split(":") if isinstance(over, str) else over)
    except ValueError:
        start = end = math.nan
    if not 0 <= start < end < math.inf:
        raise ConfigError(
            f"--over {plain(str(over))}: is no window; give two amounts of {AXES[per].unit} of which the "
            f"first is smaller, as 0:200, or whole, or last"
        )
    return Window(per, max(0.0, start - 1) if per == STEPS else start, end)
