"""Numbers and times as people read them."""

from __future__ import annotations

import math

MISSING = "-"


def number(value: float | None, digits: int = 3) -> str:
    """Show a number, or a dash."""
    if value is None or not math.isfinite(value):
        return MISSING if value is None or math.isnan(value) else "none"
    return f"{value:.{digits}f}"


def spread(mean: float | None, std: float | None) -> str:
    """Show mean ± spread; without a spread, the mean alone."""
    return number(mean) if std is None else f"{number(mean)} ± {number(std)}"


def duration(seconds: float | None) -> str:
    """Show a time span in its two largest units."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if seconds < 10:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"
