"""Timestamps as the records write them: ISO 8601, UTC, milliseconds.

They are for people, for ordering runs of one machine at a glance, and for estimates. Nothing is
decided by them: durations come from a monotonic clock, order from line and step numbers, liveness
from locks.
"""

from __future__ import annotations

import time
from datetime import datetime


def utc_now() -> str:
    """Return the current time as `2025-01-31T12:00:00.123Z`."""
    return _as_text(time.time_ns())


def utc_at(posix_s: float) -> str:
    """Return a time in seconds since 1970 as `utc_now` does."""
    return _as_text(round(posix_s * 1e9))


def _as_text(time_ns: int) -> str:
    seconds, rest_ns = divmod(time_ns, 1_000_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{rest_ns // 1_000_000:03d}Z"


def posix_s(timestamp: object) -> float | None:
    """Return a timestamp as seconds since 1970; None if it is none."""
    try:
        return datetime.fromisoformat(str(timestamp)).timestamp()
    except (ValueError, OverflowError):
        return None


def seconds_between(earlier: object, later: object) -> float | None:
    """Return the seconds between two timestamps; None if either is none, or the clock was set back."""
    try:
        span = datetime.fromisoformat(str(later)) - datetime.fromisoformat(str(earlier))
    except (ValueError, TypeError):
        return None
    return seconds if (seconds := span.total_seconds()) >= 0 else None
