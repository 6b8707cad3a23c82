"""In which keys configurations differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from retrain.config.digest import BESIDE_RESULTS
from retrain.records.text import plain
from retrain.report.gather import RunRecord

SEED = "training.seed"  # runs of a condition differ in it by definition
ABSENT = "(absent)"
VALUE_LIMIT = 80
CONTEXT = 20  # characters shown before two long values part


@dataclass(frozen=True)
class KeyDifference:
    """A key, and its value on each side; several values where a side's own runs differ."""

    key: str
    values: tuple[str, ...]


def differences(sides: Sequence[Sequence[RunRecord]]) -> tuple[KeyDifference, ...]:
    """List every key that is not the same in all runs of all sides, seeds and places left out."""
    flat = [[dict(flatten(run.config)) for run in runs if run.config] for runs in sides]
    keys = sorted({key for side in flat for tables in side for key in tables} - {SEED})
    found = {key: [_values(side, key) for side in flat] for key in keys}
    return tuple(KeyDifference(key, _shown(by_side)) for key, by_side in found.items() if _differ(by_side))


def flatten(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Return `section.key` and value of all that decides a run's result."""
    for key, value in tables.items():
        if not prefix and key in BESIDE_RESULTS:
            continue
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        elif value != {}:
            yield prefix + key, value


def _values(side: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    """Return the values that a side's runs have, each once; none if no run's configuration can be read."""
    return list(dict.fromkeys(repr(one[key]) if key in one else ABSENT for one in side))


def _differ(by_side: Sequence[Sequence[str]]) -> bool:
    return len({value for values in by_side for value in values}) > 1


def _shown(by_side: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Cut values to what fits; of long ones that begin alike, the part where they part."""
    letters = zip(*(value for values in by_side for value in values), strict=False)
    alike = sum(1 for _ in takewhile(lambda place: len(set(place)) == 1, letters))
    start = max(0, alike - CONTEXT) if alike > VALUE_LIMIT - CONTEXT else 0
    cut = "…" if start else ""
    return tuple(
        " | ".join(cut + plain(value[start:], VALUE_LIMIT) for value in values) or ABSENT
        for values in by_side
    )
