"""Reads the score that ends a judge's reply; what could mean two things is no score."""

from __future__ import annotations

import math
import re

from retrain.rewards import UnscoredError

# all that belongs to the number is taken, so that "0,5" is refused and not read as 0
SCORE = re.compile(
    r"score\W{0,10}?(-?\.?\d(?:[\w.,]|(?<=[eE])-)*)(?:\s*/\s*(\d[\w.,]*))?\s*(%?)", re.IGNORECASE
)


def read_score(reply: str) -> float:
    """Return the last score of a judge's reply: a number, a fraction such as 8/10, or a percentage.

    Raises:
        UnscoredError: there is none from 0 to 1.
    """
    found = SCORE.findall(reply)
    value = _value(*found[-1]) if found else math.nan
    if not 0 <= value <= 1:
        raise UnscoredError(f"the judge's reply holds no score from 0 to 1: ...{reply[-200:]!r}")
    return value


def _value(number: str, whole: str, percent: str) -> float:
    try:
        value = float(number.rstrip(".,_")) / float(whole.rstrip(".,_") or 1)
    except (ValueError, ZeroDivisionError):
        return math.nan
    return value / 100 if percent else value
