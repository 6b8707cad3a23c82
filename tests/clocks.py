"""Rows without what a clock decides, for tests that compare runs to the last digit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

TIMES = ("_s", "_per_second", "timestamp", "attempt")  # what a clock or the number of lives decides


def without_times(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if not key.endswith(TIMES)} for row in rows]
