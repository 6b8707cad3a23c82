"""Averages of a few numbers; None if no number is known.

Importing the standard library's `statistics` takes 10 ms, too long for `status`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


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
