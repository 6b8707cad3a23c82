"""Averages of a few numbers, None where there is nothing to average.

The standard library's `statistics` costs 10 ms to import, a third of what `status` may take.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def mean(values: Sequence[float]) -> float | None:
    """Arithmetic mean; None of nothing."""
    return math.fsum(values) / len(values) if values else None


def median(values: Sequence[float]) -> float | None:
    """Middle value, or the mean of the two; None of nothing."""
    ordered = sorted(values)
    return mean(ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1])


def sample_std(values: Sequence[float]) -> float | None:
    """Sample standard deviation (divided by n - 1); None below two values."""
    centre = mean(values)
    if centre is None or len(values) < 2:
        return None
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))
