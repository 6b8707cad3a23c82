"""Lists failed runs, each with its reason and the end of its output."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from retrain.errors import RecordsError
from retrain.records.files import open_regular
from retrain.records.layout import RunFiles
from retrain.records.lines import read_tail
from retrain.records.text import plain
from retrain.report.gather import RunRecord

TAIL_LINES = 30
LINE_LIMIT = 300
MOST_TAILS = 20  # runs of a campaign tend to fail alike
TROUBLED = ("died", "interrupted")


@dataclass(frozen=True)
class Failure:
    """A run that failed, or had a failed attempt."""

    run_id: str
    state: str
    step: int
    max_steps: int | None
    attempts: tuple[str, ...]  # how each ended
    message: str
    tail: tuple[str, ...]  # last lines of its output; empty beyond the first few failures


def failures(runs: Sequence[RunRecord]) -> tuple[Failure, ...]:
    """List runs that failed, were interrupted, or needed more than one attempt."""
    found = [run for run in runs if run.has_failed or run.state in TROUBLED or len(run.attempts) > 1]
    found.sort(key=lambda run: not run.has_failed)
    return tuple(_failure(run, with_tail=i < MOST_TAILS and not run.is_done) for i, run in enumerate(found))


def _failure(run: RunRecord, *, with_tail: bool) -> Failure:
    return Failure(
        run_id=run.run_id,
        state=run.state,
        step=run.last_step,
        max_steps=run.max_steps,
        attempts=tuple(plain(attempt.ending or "died without a message") for attempt in run.attempts),
        message=run.message,
        tail=_tail(RunFiles(run.directory)) if with_tail else (),
    )


def _tail(files: RunFiles) -> tuple[str, ...]:
    try:
        fd = open_regular(files.output_log)
    except (FileNotFoundError, RecordsError):
        return ()
    try:
        lines = [line.decode(errors="replace") for line in read_tail(fd, TAIL_LINES)]
    finally:
        os.close(fd)
    return tuple(_indent(line) + plain(line, LINE_LIMIT) for line in lines)


def _indent(line: str) -> str:
    """Return the indentation of a line, which makes tracebacks readable."""
    return " " * min(len(line) - len(line.lstrip(" ")), 40)
