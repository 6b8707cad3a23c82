"""start.json: what a run's evaluations found before its first step, which has no row."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from retrain.base.errors import RecordsError
from retrain.records.files import read_json, record_of
from retrain.records.layout import RunFiles


@dataclass(frozen=True)
class Start:
    """Evaluations before the first step."""

    metrics: Mapping[str, str | float | None] = field(default_factory=dict)  # as rows have them
    made_by: Mapping[str, str] = field(default_factory=dict)  # run by evaluation, "" for the run's own


def read_start(files: RunFiles) -> Start:
    """Read a run's evaluations before its first step; none if it has none, or they cannot be read."""
    with suppress(RecordsError, ValueError):
        return record_of(Start, read_json(files.start) or {})
    return Start()
