"""Format and parse time spans: `6h`, `1h30m`, `31 min`."""

from __future__ import annotations

import math
import re

MISSING = "-"
UNITS_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_PART = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(s|min|m|h|d)")


def format_duration(seconds: float | None) -> str:
    """Format a span in its two largest units: `4.2 ms`, `9.5 s`, `3 h 20 min`, `2 d 4 h`; or a dash."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    if 0 < seconds < 0.0995:  # from there on it rounds to 0.1 s
        return f"{seconds * 1000:.2g} ms"
    if seconds < 10:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


def about(seconds: float) -> str:
    """Format a span to the precision of an estimate: `31 min`, not `31 min 4 s`."""
    if 600 <= seconds < 3600:
        seconds = round(seconds / 60) * 60
    return format_duration(seconds).removesuffix(" 0 s").removesuffix(" 0 min").removesuffix(" 0 h")


def parse_duration(text: str) -> float:
    """Read `6h`, `90m`, `90 min`, `1h30m`, `2d`, `45s`.

    Raises:
        ValueError: it is not a time span, or is zero.
    """
    seconds = math.fsum(float(number) * UNITS_S[unit] for number, unit in _PART.findall(text))
    if _PART.sub("", text).strip() or not 0 < seconds < math.inf:
        raise ValueError(f"{text!r} is not a time span; write it as 6h, 90m or 1h30m")
    return seconds
