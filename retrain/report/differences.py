"""In which keys configurations differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retrain.config.resolve import NOT_IN_DIGEST
from retrain.records.text import plain
from retrain.report.gather import RunRecord

SEED = "training.seed"  # runs of a condition differ in it by definition
ABSENT = "(absent)"
VALUE_LIMIT = 80


@dataclass(frozen=True)
class KeyDifference:
    """A key, and its value on each side; several values where a side's own runs differ."""

    key: str
    values: tuple[str, ...]


def differences(sides: Sequence[Sequence[RunRecord]]) -> tuple[KeyDifference, ...]:
    """List every key that is not the same in all runs of all sides, seeds and places left out."""
    flat = [[dict(flatten(run.config)) for run in runs if run.config] for runs in sides]
    keys = sorted({key for side in flat for tables in side for key in tables} - {SEED})
    rows = (KeyDifference(key, tuple(_shown(side, key) for side in flat)) for key in keys)
    return tuple(row for row in rows if len(set(row.values)) > 1 or " | " in row.values[0])


def flatten(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Give `section.key` and value of all that decides a run's result."""
    for key, value in tables.items():
        if not prefix and key in NOT_IN_DIGEST:
            continue
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        elif value != {}:
            yield prefix + key, value


def _shown(side: Sequence[Mapping[str, Any]], key: str) -> str:
    values = dict.fromkeys(plain(repr(one[key]), VALUE_LIMIT) if key in one else ABSENT for one in side)
    return " | ".join(values) or ABSENT
