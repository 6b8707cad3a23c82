"""Reads a run, for `status`, its live view, the roll-up, report and export alike.

A reading holds the run's row, the records that it follows from, and marks of the files. It is valid while the
marks are: given to the next reading, nothing that has not changed is read again. A manifest keeps the reading
of a run that is over. A run's whole history is never read, only its small files and the ends of its
metrics.jsonl.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from retrain.base.errors import RecordsError
from retrain.base.locks import is_held
from retrain.base.redaction import redacted
from retrain.records.files import opened
from retrain.records.layout import RunFiles
from retrain.records.lines import Mark, Row, mark_of, number_in, read_tail
from retrain.records.metrics import MetricsEnds, mean, median, read_ends, steps_averaged
from retrain.records.pace import pace_of
from retrain.records.run_row import (
    AT_RUNG,
    CALM,
    OF_LAST_STEP,
    OF_PROGRESS,
    TAIL_ROWS,
    PlannedRun,
    RunRow,
    row_of,
)
from retrain.records.run_state import (
    ENDINGS,
    UNREADABLE,
    WAITING,
    Inspection,
    Progress,
    RunState,
    inspect_run,
    read_progress,
    rung_of,
)
from retrain.records.spending import columns_of, read_spending

Marks: TypeAlias = tuple[tuple[int, int] | None, ...]  # bytes, time of the last change in ns; None: no file
MARKED = ("done.json", "attempts.jsonl", "metrics.jsonl")  # what a row of a run that is over depends on
NO_FILES: Marks = (None, None, None)
UNTOUCHED = Inspection(RunState.PENDING, (), None)
NO_MESSAGE = "ended without a message (killed?)"


@dataclass(frozen=True)
class RunReading:
    """A run as its files are; two are equal if they show the same."""

    row: RunRow
    rewards: tuple[float, ...] = ()  # mean reward over the steps so far, where a view follows them
    marks: Marks = field(default=NO_FILES, compare=False)  # taken before the files were read
    is_over: bool = field(default=False, compare=False)  # and recorded how: only `marks` can change the row
    seen: Inspection = field(default=UNTOUCHED, compare=False)  # not kept by a manifest
    ends: MetricsEnds = field(default=MetricsEnds(None, []), compare=False)
    progress: Progress | None = field(default=None, compare=False)
    worker: tuple[bool, Mark | None] = field(default=(False, None), compare=False)  # lives; its status.json


def read_run(
    planned: PlannedRun,
    files: RunFiles,
    before: RunReading | None = None,
    read: Callable[[], MetricsEnds] | None = None,
    *,
    is_checked: bool = False,
    is_rolled_up: bool = False,
) -> RunReading:
    """Read a run's directory, which may be missing; return `before` itself if nothing changed since.

    Args:
        planned: the run; the same as `before` was read for.
        files: its files.
        before: an earlier reading.
        read: reads metrics.jsonl instead of `read_ends`, with at least what there is of `KEYS`.
        is_checked: whether a finished run's seal is checked even if its files have their marks.
        is_rolled_up: whether only the row of a run that is over matters; no rows of others are read.

    Raises:
        RecordsError: a file cannot be read, or metrics.jsonl changed after the run finished.
    """
    if before is None and _is_untouched(files.directory):
        return RunReading(row_of(planned, {"state": RunState.PENDING}))
    marks = marks_of(files)
    is_same = before is not None and before.marks == marks
    if before is not None and is_same and before.is_over and not is_checked:
        return before
    worker = is_held(files.lock), mark_of(f"{files.directory}/status.json")
    if before is not None and is_same and not before.is_over and before.worker == worker:
        return before
    known = before if before is not None and not before.is_over else None
    if known is not None and known.marks[:2] == marks[:2] and known.worker[0] == worker[0]:
        seen = known.seen
    else:
        seen = inspect_run(files, planned.config_hash)
    is_over = seen.state in ENDINGS and (not seen.attempts or seen.attempts[-1].ending in ENDINGS)
    if before is not None and is_same and is_over and before.row.state == seen.state:
        spent = _spent(files, is_alive=False)
        row = replace(before.row, **spent) if spent else before.row
        return RunReading(row, before.rewards, marks, is_over=True, seen=seen)
    progress, problem = (None, "") if seen.state == RunState.DONE else progress_of(files.status)
    if known is not None and known.marks[2] == marks[2]:
        ends = known.ends
    elif is_rolled_up and not is_over:
        ends = MetricsEnds(None, [])
    else:
        ends = read() if read is not None else read_ends(files.metrics, TAIL_ROWS, with_late=True)
    row = _row(planned, files, seen, ends, progress, why(files, seen) or problem)
    return RunReading(row, ends.rewards, marks, is_over, seen, ends, progress, worker)


def unreadable_row(planned: PlannedRun, error: RecordsError) -> RunRow:
    """Return the row of a run whose files cannot be read."""
    return row_of(planned, {"state": UNREADABLE, "message": str(error)})


def marks_of(files: RunFiles) -> Marks:
    """Return the marks of the files that the row of a run that is over depends on."""
    marks = (mark_of(f"{files.directory}/{name}") for name in MARKED)  # a Path would double the cost
    return tuple(mark and mark[1:] for mark in marks)


def _is_untouched(directory: Path) -> bool:
    """Whether a run has not started, in one system call: so most runs of a large campaign cost little."""
    try:
        return os.listdir(directory) == ["run.toml"]  # noqa: PTH208 (only names are needed)
    except OSError:  # missing, or an error that reading its files will report
        return False


def _row(
    planned: PlannedRun,
    files: RunFiles,
    seen: Inspection,
    ends: MetricsEnds,
    progress: Progress | None,
    message: str,
) -> RunRow:
    last: Row = ends.last[-1] if ends.last else {}
    result = seen.done.result if seen.done else {}
    rewards, evaluated = _numbers(ends.late, "mean_reward"), _numbers(ends.last, "eval_reward")
    final = number_in(result, "eval_reward")
    columns: dict[str, Any] = {
        "state": str(seen.state),
        "attempt": seen.attempts[-1].number if seen.attempts else 0,
        "host": seen.attempts[-1].host if seen.attempts else "",
        "step": last.get("step", 0),
        "reward_first": number_in(ends.first, "mean_reward"),
        "reward_last": rewards[-1] if rewards else None,
        "reward_mean": mean(rewards),
        "reward_steps": min(last["step"], steps_averaged(last["step"])) if rewards else None,
        "eval_reward": final if final is not None else next(reversed(evaluated), None),
        "eval_falling": str((result if seen.done else last).get("eval_falling", "")),
        "step_time_s": median(_numbers(ends.last, "step_time_s")),
        "message": message,
        "pace": pace_of(ends, seen.attempts),
        **{name: _value(last, name, kind) for name, kind in OF_LAST_STEP.items()},
    }
    columns |= _spent(files, is_alive=seen.state == RunState.RUNNING)
    if progress is not None:
        columns |= {"step": max(progress.step, columns["step"]), "max_steps": progress.max_steps}
        if seen.state == RunState.RUNNING:
            columns |= {name: getattr(progress, name) for name in OF_PROGRESS}
    rung = rung_of(seen.attempts[-1].message) if seen.attempts else ""
    if rung and seen.state == RunState.INTERRUPTED:
        columns |= {"state": WAITING, "phase": f"{AT_RUNG}{rung}"}
    return row_of(planned, columns)


def _spent(files: RunFiles, *, is_alive: bool) -> dict[str, Any]:
    spending = read_spending(files)
    return columns_of(spending, is_alive=is_alive) if spending is not None else {}


def _value(row: Row, key: str, kind: str) -> str | int | float | None:
    """Return a value of a row, converted to a column's type."""
    if kind == "str":
        return str(row.get(key, ""))
    if kind == "int | None":
        value = row.get(key)
        return value if isinstance(value, int) else None
    return number_in(row, key)


def _numbers(rows: Sequence[Row], key: str) -> list[float]:
    return [value for row in rows if (value := number_in(row, key)) is not None]


def progress_of(status: Path) -> tuple[Progress | None, str]:
    """Return the content of status.json, or the reason why it cannot be read."""
    # it is not synced, so a power loss may empty it: that loses a step count, not the run
    try:
        return read_progress(status), ""
    except RecordsError as error:
        return None, str(error)


def why(files: RunFiles, seen: Inspection) -> str:
    """Return why a run failed (the last line of its error), or the message of a finished run.

    A worker that was killed records no error; then its last output is quoted as what it is.
    """
    if seen.state == RunState.DONE and seen.attempts:
        return seen.attempts[-1].message
    if seen.state in CALM:
        return ""
    lines = seen.attempts[-1].message.strip().splitlines()
    if lines:
        return lines[-1]
    output = last_output(files, 1)
    return NO_MESSAGE + (f"; last output: {output[-1]}" if output and output[-1].strip() else "")


def last_output(files: RunFiles, count: int) -> list[str]:
    """Return the last lines of a run's output, as they are but for secrets; none without a file."""
    try:
        with opened(files.output_log) as fd:
            return [redacted(line.decode(errors="replace")) for line in read_tail(fd, count)]
    except FileNotFoundError:
        return []
