"""Summaries of finished runs in the manifest, so that readers need not open the runs' files again.

A summary is valid while the sizes and modification times of three files are unchanged. Any change of a
run's state changes attempts.jsonl, to which a worker writes first, or done.json. The third file is
metrics.jsonl, the source of the figures. A directory that was copied without its times is read again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from retrain.records.growing import mark_of
from retrain.records.layout import RunFiles
from retrain.records.metrics import Pace
from retrain.records.run_row import PlannedRun, RunRow, row_of, row_of_inspected
from retrain.records.run_state import ENDINGS, Inspection

Marks = tuple[tuple[int, int] | None, ...]  # of NAMES: bytes, time of the last change in ns; None: not there
NAMES = ("done.json", "attempts.jsonl", "metrics.jsonl")


@dataclass(frozen=True)
class Summary:
    """Summary of a run's directory, valid while its files have these marks."""

    marks: Marks
    row: RunRow


def marks_of(files: RunFiles) -> Marks:
    """Return the marks of the files that a run's state depends on."""
    directory = str(files.directory)  # called for every run of a campaign: a Path would double the cost
    found = (mark_of(f"{directory}/{name}") for name in NAMES)
    return tuple(mark and mark[1:] for mark in found)


def summarize(
    planned: PlannedRun, files: RunFiles, seen: Inspection, marks: Marks, before: Summary | None
) -> Summary | None:
    """Summarize a run that ended; None if it has not, or its worker did not record how it ended.

    `marks` were taken before its state was read; the summary `before` is kept if its marks are the same.
    """
    if seen.state not in ENDINGS or (seen.attempts and seen.attempts[-1].ending not in ENDINGS):
        return None
    if before is not None and before.marks == marks and before.row.state == seen.state:
        return before
    return Summary(marks, row_of_inspected(planned, files, seen))


def to_json(summary: Summary) -> dict[str, Any]:
    """Return a summary as JSON, without unknown values and without what the manifest holds anyway."""
    row = summary.row
    found = {name: value for name in _KINDS if (value := getattr(row, name)) != _DEFAULTS[name]}
    pace = row.pace
    if pace is not None:
        found["pace"] = [pace.steps, pace.step_s, pace.recent_s, pace.startup_s, pace.since_s, pace.until_s]
    return {"marks": summary.marks, "summary": found}


def from_json(found: object, planned: PlannedRun) -> Summary | None:
    """Parse the result of `to_json`; None if it is anything else: the run's directory is then read."""
    try:
        return _parse(found, planned) if isinstance(found, dict) else None
    except (LookupError, TypeError, ValueError, OverflowError):
        return None


def _parse(found: Mapping[str, Any], planned: PlannedRun) -> Summary:
    marks = tuple(None if mark is None else (int(mark[0]), int(mark[1])) for mark in found["marks"])
    if len(marks) != len(NAMES):  # from 0.1.0, which did not check metrics.jsonl
        raise ValueError("a summary that says too little")
    summary = dict(found["summary"])
    pace = summary.pop("pace", None)
    is_finite = all(math.isfinite(value) for value in summary.values() if isinstance(value, float))
    if not is_finite or not all(type(value) in _KINDS[name] for name, value in summary.items()):
        raise ValueError("a summary with a value of another kind")
    return Summary(marks, row_of(planned, summary | {"pace": _pace_in(pace) if pace else None}))


def _pace_in(found: Any) -> Pace:
    steps, step_s, recent_s, *rest = found  # earlier records have no times of day
    more = [None if time is None else float(time) for time in rest]
    pace = Pace(int(steps), float(step_s), tuple(map(float, recent_s)), *more)
    times = (pace.step_s, *pace.recent_s, *(time or 0.0 for time in more))
    if pace.steps < 1 or not pace.recent_s or not all(math.isfinite(time) for time in times):
        raise ValueError("a pace that is none")
    return pace


_ELSEWHERE = ("run_id", "condition", "seed", "pace")  # in the manifest, or stored in a form of its own
_STORED = [column for column in fields(RunRow) if column.name not in _ELSEWHERE]
_DEFAULTS = {column.name: None if column.default is MISSING else column.default for column in _STORED}
_TYPES = {"str": (str,), "int": (int,), "int | None": (int,), "float | None": (float, int)}
_KINDS = {column.name: _TYPES[str(column.type)] for column in _STORED}
