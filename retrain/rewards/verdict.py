"""Reads a judge's verdict: the last line of its reply, or its JSON.

A score anywhere else may be a quotation from the completion, so it counts for nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

from retrain.rewards import UnscoredError

# the whole number, so that "0,5" is not read as 0
NUMBER = r"(-?\.?\d(?:[\w.,]|(?<=[eE])-)*)(?:\s*/\s*(\d[\w.,]*))?\s*(%?)"
# the whole line, which begins with no quotation mark
VERDICT = re.compile(
    rf"[\s*_#-]*(?:(?:final|overall) )?score\W{{0,10}}?{NUMBER}[\s*_.$\]}}>]*", re.IGNORECASE
)
FENCED = re.compile(r"```(?:json)?\s*(\{[^`]*\})\s*```\Z", re.IGNORECASE)
EXCERPT = 300  # characters of a reply that are shown


def read_score(reply: str, masked: Callable[[str], str] = str) -> float:
    """Return the verdict of a judge's reply: a number, a fraction such as 8/10, or a percentage.

    Args:
        reply: ends with a line "Score: x" or a block of JSON, or is JSON.
        masked: returns a text without the key.

    Raises:
        UnscoredError: there is none from 0 to 1.
    """
    value = _verdict(reply.strip())
    if not 0 <= value <= 1:
        raise UnscoredError(f"the judge's reply has no score from 0 to 1: ...{masked(reply)[-EXCERPT:]!r}")
    return value


def _verdict(reply: str) -> float:
    last_line = reply.rpartition("\n")[2]
    fenced = FENCED.search(reply)
    for text in (reply, fenced[1] if fenced else "", last_line):
        if text.startswith("{"):
            return _of_json(text)
    found = VERDICT.fullmatch(last_line)
    return _value(*found.groups()) if found else math.nan


def _of_json(text: str) -> float:
    try:
        scores = [value for key, value in json.loads(text).items() if key.lower() == "score"]
    except (ValueError, RecursionError):
        return math.nan
    found = re.fullmatch(NUMBER, str(scores[0])) if len(scores) == 1 else None
    return _value(*found.groups()) if found else math.nan


def _value(number: str, whole: str | None, percent: str) -> float:
    try:
        value = float(number.rstrip(".,_")) / float((whole or "").rstrip(".,_") or 1)
    except (ValueError, ZeroDivisionError):
        return math.nan
    return value / 100 if percent else value
