"""Follows one run: checks its files with a few `stat` calls, reads what changed, and derives its events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from retrain.base.errors import RecordsError
from retrain.base.locks.held import is_held
from retrain.records.layout import RunFiles
from retrain.records.lines import GrowingFile, Row, is_count, mark_of, number_in, parse_line
from retrain.records.manifest import RunEntry
from retrain.records.metrics import MetricsEnds, latest_telling, read_middle
from retrain.records.run_row import (
    KEYS,
    NAME_LIMIT,
    TAIL_ROWS,
    RunRow,
    progress_of,
    row_of_parts,
    unreadable_row,
    why,
)
from retrain.records.run_state import (
    PAUSED,
    WAITING,
    Attempt,
    Inspection,
    Progress,
    RunState,
    inspect_run,
    rung_of,
)
from retrain.records.spending import read_spending
from retrain.records.text import plain

ROW_KEYS = ("timestamp", "throttle_level", "throttle_reason", "bp_action", "bp_batch_size", "bp_reason")
_CALM = ("", "done", "interrupted")
_NEEDED = ("step", *KEYS, *ROW_KEYS)
MOST_POINTS = 64  # of a curve, wider than any sparkline; further points are merged with neighbours


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One event; its text is safe to print."""

    at: str  # UTC, as the records say it; "" if they do not
    kind: str  # started, retried, resumed, throttle, batch, paused, notice, or an attempt's ending
    text: str = ""  # the reason, or what it went to
    run_id: str = ""  # "" if it is about the campaign as a whole
    campaign: str = ""  # filled in by `Watcher`
    name: str = ""  # of the run, as tables show it


@dataclass(frozen=True, slots=True)
class WatchedRun:
    """The current state of a run; the same object until something changes."""

    row: RunRow
    rewards: tuple[float, ...]  # mean reward over the steps so far, each the mean of as many steps


class RunTracker:
    """The state of one run, brought up to date by `refresh`."""

    def __init__(self, files: RunFiles, run_id: str) -> None:
        self._files = files
        self._run_id = plain(run_id, NAME_LIMIT)
        self._metrics = _MetricsTracker(files.metrics)
        self._lock, self._status = files.lock, files.status  # building a path costs more than a stat
        self._names = tuple(str(path) for path in (files.done, files.attempts))
        self._status_name = str(files.status)
        self._marks: object = None
        self._status_mark: object = None
        self._planned: object = None
        self._seen = Inspection(RunState.PENDING, (), None)
        self._progress: tuple[Progress | None, str] = (None, "")
        self.now: WatchedRun | None = None

    def refresh(self, planned: RunEntry, events: list[WatchEvent]) -> WatchedRun:
        """Bring the row up to date; an unreadable file makes the run unreadable, and is retried."""
        found: list[WatchEvent] = []
        plan = planned.condition, planned.seed, planned.max_steps, planned.config_hash
        is_planned_anew, self._planned = plan != self._planned, plan
        try:
            changed = [
                self._refresh_state(planned, found, is_planned_anew=is_planned_anew),
                self._refresh_progress(found),
                self._metrics.refresh(found),
            ]
            if any(changed) or is_planned_anew or self.now is None:
                progress, problem = (None, "") if self._seen.done else self._progress
                message = why(self._files, self._seen) or problem
                spent = read_spending(self._files)
                row = row_of_parts(planned, self._seen, self._metrics.ends(), progress, message, spent)
                self.now = WatchedRun(row, self._metrics.curve.values())
        except RecordsError as error:
            self.now = WatchedRun(unreadable_row(planned, error), ())
            self._marks = None
        for event in found:
            safe = replace(event, at=plain(event.at), text=plain(event.text))
            events.append(replace(safe, run_id=self._run_id, name=self.now.row.name))
        return self.now

    def _refresh_state(self, planned: RunEntry, events: list[WatchEvent], *, is_planned_anew: bool) -> bool:
        files = tuple(mark_of(name) for name in self._names)
        is_over = self._seen.state is RunState.DONE and self._marks == (files, False)
        marks = (files, False if is_over else is_held(self._lock))
        if marks == self._marks and not is_planned_anew:
            return False
        before, self._seen = self._seen, inspect_run(self._files, planned.config_hash)
        events += _of_attempts(before.attempts, self._seen.attempts)
        if self._seen.state is RunState.DIED and before.state is not RunState.DIED:
            events.append(self._death())
        self._marks = marks
        return True

    def _death(self) -> WatchEvent:
        """Return the event of a worker's death, at the last sign of life of its attempt."""
        last, progress = self._seen.attempts[-1], progress_of(self._status)[0]
        at = progress.updated_at if progress and progress.attempt == last.number else last.started_at
        return WatchEvent(at, RunState.DIED, plain(why(self._files, self._seen)))

    def _refresh_progress(self, events: list[WatchEvent]) -> bool:
        mark = mark_of(self._status_name)
        if self._seen.state is RunState.DONE or mark == self._status_mark:
            return False
        before, (now, problem) = self._progress[0], progress_of(self._status)
        self._progress, self._status_mark = (now, problem), mark
        was_paused = before is not None and before.phase.startswith(PAUSED)
        if now is not None and now.phase.startswith(PAUSED) and not was_paused:
            why = now.phase.removeprefix("paused").lstrip(": ")
            events.append(WatchEvent(now.updated_at, "paused", f"{why}: {now.detail}".removesuffix(": ")))
        return True


@dataclass(slots=True)
class RewardCurve:
    """Mean rewards over equal spans of steps, so that a thousand runs' curves take little memory."""

    span: int = 1  # steps to a point
    _sums: dict[int, tuple[float, int]] = field(default_factory=dict)  # of each span, and steps in it
    _last_step: int = -1

    def add(self, step: int, value: float) -> None:
        """Add a step; an earlier step discards all later ones, as a resumed run does."""
        if step <= self._last_step:
            self._sums = {span: kept for span, kept in self._sums.items() if span < step // self.span}
        self._last_step = step
        self._put(step // self.span, value, 1)
        while len(self._sums) > MOST_POINTS:
            sums, self._sums, self.span = self._sums, {}, self.span * 2
            for span, kept in sums.items():
                self._put(span // 2, *kept)

    def values(self) -> tuple[float, ...]:
        """Return the means, the earliest first."""
        return tuple(total / count for total, count in self._sums.values())

    def _put(self, span: int, value: float, steps: int) -> None:
        total, count = self._sums.get(span, (0.0, 0))
        self._sums[span] = total + value, count + steps


class _MetricsTracker:
    """The ends and the curve of a metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, GrowingFile(path)
        self._first: Row | None = None
        self._middle: Row | None = None
        self._last: list[Row] = []
        self.curve = RewardCurve()

    def refresh(self, events: list[WatchEvent]) -> bool:
        growth = self._file.read_growth()
        if growth is None:
            return False
        if growth.begins_anew:
            self._first, self._last, self.curve = None, [], RewardCurve()
        rows = list(_kept(map(parse_line, growth.lines)))
        events += _of_rows(self._last[-1] if self._last else None, rows)
        self._first = self._first or next(iter(rows), None)
        self._middle = next(_kept([read_middle(self._path)]), None)
        self._last = latest_telling([*self._last, *rows])[-TAIL_ROWS:]
        for row in rows:
            if (reward := number_in(row, "mean_reward")) is not None:
                self.curve.add(row["step"], reward)
        return True

    def ends(self) -> MetricsEnds:
        return MetricsEnds(self._first, self._last, self._middle)


def _kept(rows: Iterable[Row | None]) -> Iterator[Row]:
    """Iterate over what is shown of each row: of thousands of runs, whole ones would take much memory."""
    for row in rows:
        if row and is_count(row.get("step")):
            yield {key: row[key] for key in _NEEDED if key in row}


def _of_attempts(before: Sequence[Attempt], now: Sequence[Attempt]) -> Iterator[WatchEvent]:
    """Iterate over starts, retries and endings that are in `now` and were not in `before`."""
    known = {attempt.number for attempt in before}
    known_endings = {attempt.number for attempt in before if attempt.ending is not None}
    previous = ""
    for attempt in now:
        if attempt.number not in known:
            yield _begun(attempt, previous)
        if attempt.ending is not None and attempt.number not in known_endings:
            yield _ended(attempt, attempt.ending)
        previous = attempt.ending or RunState.DIED


def _begun(attempt: Attempt, previous: str) -> WatchEvent:
    """Return the event of an attempt's start; `previous` is how the one before it ended."""
    if attempt.number == 1:
        return WatchEvent(attempt.started_at, "started")
    kind = "resumed" if previous in _CALM else "retried"
    text = f"attempt {attempt.number}, from step {attempt.resumed_from_step}"
    return WatchEvent(attempt.started_at, kind, text)


def _ended(attempt: Attempt, ending: str) -> WatchEvent:
    reason = "" if ending == RunState.DONE else attempt.message.strip()
    last_line = reason.splitlines()[-1] if reason else ""
    kind = WAITING if rung_of(last_line) else plain(ending, 20)
    return WatchEvent(attempt.ended_at or "", kind, last_line)


def _of_rows(before: Row | None, rows: Sequence[Row]) -> Iterator[WatchEvent]:
    """Iterate over changes of the throttle's level and of back pressure's batch size."""
    for row in rows:
        at = str(row.get("timestamp", ""))
        was, level = (before or {}).get("throttle_level"), row.get("throttle_level")
        if level != was and (before is not None or level != "full") and level is not None:
            yield WatchEvent(at, "throttle", f"{was or 'full'} -> {level}: {row.get('throttle_reason', '')}")
        if row.get("bp_action") in ("throttle", "increase"):
            text = f"{row['bp_action']} to {row.get('bp_batch_size')}: {row.get('bp_reason', '')}"
            yield WatchEvent(at, "batch", text)
        before = row
