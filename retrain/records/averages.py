"""Averages of a few numbers, None where there is nothing to average.

The standard library's `statistics` costs 10 ms to import, a third of what `status` may take.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean; None of nothing."""
    if not values:
        return None
    try:
        return math.fsum(values) / len(values)
    except OverflowError:  # absurd numbers in a damaged file are no reason to fail
        return sum(value / len(values) for value in values)


def median(values: Sequence[float]) -> float | None:
    """Middle value, or the mean of the two; None of nothing."""
    ordered = sorted(values)
    return mean(ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1])


def sample_std(values: Sequence[float]) -> float | None:
    """Sample standard deviation (divided by n - 1); None below two values."""
    centre = mean(values)
    if centre is None or len(values) < 2:
        return None
    return math.hypot(*(value - centre for value in values)) / math.sqrt(len(values) - 1)
