"""Averages of a few numbers; None if there are no numbers.

Importing the standard library's `statistics` takes 10 ms, too long for `status`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def mean(values: Sequence[float]) -> float | None:
    """Return the arithmetic mean; None if there are no values."""
    if not values:
        return None
    try:
        return math.fsum(values) / len(values)
    except OverflowError:  # huge numbers in a damaged file must not cause a failure
        return sum(value / len(values) for value in values)


def median(values: Sequence[float]) -> float | None:
    """Return the median; None if there are no values."""
    ordered = sorted(values)
    return mean(ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1])


def sample_std(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation (divided by n - 1); None for fewer than two values."""
    centre = mean(values)
    if centre is None or len(values) < 2:
        return None
    return math.hypot(*(value - centre for value in values)) / math.sqrt(len(values) - 1)
