"""start.json: what a run's evaluations found before its first step, which has no row."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from retrain.base.errors import RecordsError
from retrain.records.files import read_json, record_of
from retrain.records.layout import RunFiles
from retrain.records.lines import number_in
from retrain.records.text import first_of

MOST_NAMED = 5  # conditions in one sentence


@dataclass(frozen=True)
class Start:
    """Evaluations before the first step."""

    metrics: Mapping[str, str | float | None] = field(default_factory=dict)  # as rows have them
    made_by: Mapping[str, str] = field(default_factory=dict)  # run by evaluation, "" for the run's own

    def value(self, metric: str) -> float | None:
        """Return a metric before the first step; None if it is not known."""
        return number_in(dict(self.metrics), metric)


def read_start(files: RunFiles) -> Start:
    """Read a run's evaluations before its first step; none if it has none, or they cannot be read."""
    with suppress(RecordsError, ValueError):
        return record_of(Start, read_json(files.start) or {})
    return Start()


def before_training(
    values: Mapping[str, float | None], gains: Mapping[str, float | None] | None = None
) -> str:
    """Return what conditions began with and gained, as a sentence; "" if that is not known of any."""

    def listed(numbers: Mapping[str, float | None], form: str) -> list[str]:
        return [f"{name} {value:{form}}" for name, value in numbers.items() if value is not None]

    if not (begun := listed(values, ".3g")):
        return ""
    shown = {f"{value:.3g}" for value in values.values() if value is not None}
    start = shown.pop() if len(shown) == 1 else first_of(begun, MOST_NAMED)
    gained = listed(gains or {}, "+.3g")
    return f"before training {start}" + (f"; since then {first_of(gained, MOST_NAMED)}" if gained else "")
