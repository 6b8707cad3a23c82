"""Formats numbers and durations for people."""

from __future__ import annotations

import math

from retrain.plan.durations import format_duration

MISSING = "-"


def significant(value: float | None, *, signed: bool = False) -> str:
    """Return three significant digits, or a dash."""
    if value is None or not math.isfinite(value):
        return MISSING
    sign = "+" if signed and value > 0 else ""
    if value == 0 or abs(value) >= 1e7 or abs(value) < 1e-4:
        return f"{sign}{value:.3g}"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{sign}{value:,.{digits}f}"


def interval(low: float | None, high: float | None) -> str:
    """Return an interval of a difference, or a dash."""
    if low is None or high is None:
        return MISSING
    return f"{significant(low, signed=True)} to {significant(high, signed=True)}"


def rounded(value: float) -> float | None:
    """Return four significant digits, enough for a plot; None if not finite."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def span(seconds: float | None) -> str:
    """Return a duration in its two largest units, or a dash."""
    return MISSING if seconds is None or not math.isfinite(seconds) else format_duration(seconds)
