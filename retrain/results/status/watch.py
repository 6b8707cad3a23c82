"""Follows a log directory: the rows of `status`, updated by reading only what changed."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path

from retrain.base.clock import utc_now
from retrain.base.errors import RecordsError
from retrain.base.locks import is_held
from retrain.records.campaign_state import parse_notice
from retrain.records.files import readable
from retrain.records.layout import (
    CampaignFiles,
    RunFiles,
    by_start,
    find_campaigns,
    is_campaign,
    is_single_run,
)
from retrain.records.lines import (
    WHOLE_BYTES,
    GrowingFile,
    Growth,
    Row,
    is_count,
    mark_of,
    number_in,
    parse_line,
)
from retrain.records.manifest import Manifest, read_manifest
from retrain.records.metrics import Late, MetricsEnds, latest_telling, read_ends, read_middle
from retrain.records.run_row import (
    KEYS,
    NAME_LIMIT,
    TAIL_ROWS,
    RunEntry,
    RunReading,
    RunRow,
    named_eval,
    read_on,
    read_run,
    unreadable_row,
    why,
)
from retrain.records.run_state import PAUSED, WAITING, RunState, rung_of
from retrain.records.text import plain
from retrain.records.windows import steps_averaged
from retrain.results.status import CampaignStatus, TimeLeft, campaign_row, runs_of, time_left_s

ROW_KEYS = ("timestamp", "throttle_level", "throttle_reason", "bp_action", "bp_batch_size", "bp_reason")
_CALM = ("", "done", "interrupted")
_NEEDED = ("step", *KEYS, *ROW_KEYS)
MIDDLE_SHIFT = 1.1  # a long file's middle is read again once the file has grown by this factor
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


class RunTracker:
    """The latest reading of one run, brought up to date by `refresh`, and its events."""

    def __init__(self, files: RunFiles, run_id: str) -> None:
        self._files = files
        self._run_id = plain(run_id, NAME_LIMIT)
        self._metrics = _MetricsTracker(files.metrics)
        self._planned: object = None
        self._last: RunReading | None = None

    def refresh(self, planned: RunEntry, events: list[WatchEvent], glance_at: str = "") -> RunReading:
        """Return a reading, the same object if nothing changed; an unreadable run is read again.

        With `glance_at`, the present time, only rows are looked for where that is enough.
        """
        plan = planned.condition, planned.seed, planned.max_steps, planned.config_hash
        last = self._last if plan == self._planned else None
        try:
            reading = None
            if glance_at and last is not None:
                reading = read_on(self._files, last, self._metrics.refresh, glance_at)
            if reading is None:
                reading = read_run(planned, self._files, last, self._metrics.refresh)
            last = self._last
            added = [] if reading is last else [*self._events(last or RunReading(reading.row), reading)]
            self._planned, self._last = plan, reading
        except RecordsError as error:
            reading, added = RunReading(unreadable_row(planned, error)), []
            self._planned = None
        for event in (*added, *self._metrics.take_events()):
            safe = replace(event, at=plain(event.at), text=plain(event.text))
            events.append(replace(safe, run_id=self._run_id, name=reading.row.name))
        return reading

    def _events(self, before: RunReading, after: RunReading) -> Iterator[WatchEvent]:
        begun = {attempt.number for attempt in before.seen.attempts}
        ended = {attempt.number for attempt in before.seen.attempts if attempt.ending is not None}
        previous = ""  # how the attempt before ended
        for attempt in after.seen.attempts:
            if attempt.number not in begun and attempt.number == 1:
                yield WatchEvent(attempt.started_at, "started")
            elif attempt.number not in begun:
                kind = "resumed" if previous in _CALM else "retried"
                text = f"attempt {attempt.number}, from step {attempt.resumed_from_step}"
                yield WatchEvent(attempt.started_at, kind, text)
            if attempt.ending is not None and attempt.number not in ended:
                reason = "" if attempt.ending == RunState.DONE else attempt.message.strip()
                last_line = reason.splitlines()[-1] if reason else ""
                kind = WAITING if rung_of(last_line) else plain(attempt.ending, 20)
                yield WatchEvent(attempt.ended_at or "", kind, last_line)
            previous = attempt.ending or RunState.DIED
        progress = after.progress
        if after.seen.state is RunState.DIED and before.seen.state is not RunState.DIED:
            attempt = after.seen.attempts[-1]
            is_of_attempt = progress is not None and progress.attempt == attempt.number
            at = progress.updated_at if progress is not None and is_of_attempt else attempt.started_at
            yield WatchEvent(at, RunState.DIED, plain(why(self._files, after.seen)))
        was_paused = before.progress is not None and before.progress.phase.startswith(PAUSED)
        if progress is not None and progress.phase.startswith(PAUSED) and not was_paused:
            reason = progress.phase.removeprefix("paused").lstrip(": ")
            yield WatchEvent(progress.updated_at, "paused", f"{reason}: {progress.detail}".removesuffix(": "))


@dataclass(slots=True)
class RewardCurve:
    """Mean rewards over equal spans of steps, so that a thousand runs' curves take little memory."""

    span: int = 1  # steps to a point
    _sums: dict[int, tuple[float, int]] = field(default_factory=dict)  # of each span, and steps in it
    _means: list[float] = field(default_factory=list)  # of the same spans
    _last_step: int = -1

    def add(self, step: int, value: float) -> None:
        """Add a step; an earlier step discards all later ones, as a resumed run does."""
        if step <= self._last_step:
            self._rebuild({span: kept for span, kept in self._sums.items() if span < step // self.span})
        self._last_step = step
        total, count = self._sums.get(step // self.span, (0.0, 0))
        if not count:
            self._means.append(0.0)
        self._sums[step // self.span] = total + value, count + 1
        self._means[-1] = (total + value) / (count + 1)
        while len(self._sums) > MOST_POINTS:
            self.span *= 2
            joined: dict[int, tuple[float, int]] = {}
            for span, (total, count) in self._sums.items():
                before = joined.get(span // 2, (0.0, 0))
                joined[span // 2] = before[0] + total, before[1] + count
            self._rebuild(joined)

    def values(self) -> tuple[float, ...]:
        """Return the means, the earliest first."""
        return tuple(self._means)

    def _rebuild(self, sums: dict[int, tuple[float, int]]) -> None:
        self._sums, self._means = sums, [total / count for total, count in sums.values()]


class _MetricsTracker:
    """The ends and the curve of a metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, GrowingFile(path)
        self._first: Row | None = None
        self._middle: Row | None = None
        self._last: list[Row] = []
        self._late: deque[Late] = deque()  # of those that the run's reward is a mean of
        self._middle_bytes = 0  # what the file had as its middle was read
        self._curve = RewardCurve()
        self._ends = MetricsEnds(None, [])
        self._events: list[WatchEvent] = []

    def refresh(self) -> MetricsEnds:
        """Read what was appended; return the same object if that is nothing."""
        growth = self._file.read_growth()
        if growth is not None:
            self._add(growth)
            rewards, late = self._curve.values(), tuple(self._late)
            self._ends = MetricsEnds(self._first, self._last, self._middle, rewards, late)
        return self._ends

    def take_events(self) -> list[WatchEvent]:
        """Return the changes of throttle and batch since the last call."""
        events, self._events = self._events, []
        return events

    def _add(self, growth: Growth) -> None:
        rows = list(_kept(map(parse_line, growth.lines)))
        if growth.begins_anew:
            self._first, self._last, self._late, self._curve = None, [], deque(), RewardCurve()
            self._middle_bytes = 0
        self._events += _of_rows(self._last[-1] if self._last else None, rows)
        self._first = self._first or next(iter(rows), None)
        if self._file.at_byte < WHOLE_BYTES or self._file.at_byte > MIDDLE_SHIFT * self._middle_bytes:
            self._middle = next(_kept([read_middle(self._path)]), None)
            self._middle_bytes = self._file.at_byte
        self._last = latest_telling([*self._last, *rows])[-TAIL_ROWS:]
        for row in rows:
            step, reward = row["step"], number_in(row, "mean_reward")
            while self._late and self._late[-1][0] >= step:
                self._late.pop()
            self._late.append((step, reward))
            if reward is not None:
                self._curve.add(step, reward)
        if self._last:
            end = self._last[-1]["step"]
            begin = max(1, end - steps_averaged(end) + 1)
            # a resume takes some back, so that earlier ones count; lines that begin a long file are a sample
            if growth.begins_anew or not self._late or self._late[0][0] > begin:
                self._late = deque(read_ends(self._path, TAIL_ROWS, with_late=True).late)
            while self._late and self._late[0][0] < begin:
                self._late.popleft()


def _kept(rows: Iterable[Row | None]) -> Iterator[Row]:
    """Iterate over what is shown of each row: of thousands of runs, whole ones would take much memory."""
    for row in rows:
        if row and is_count(row.get("step")):
            name = named_eval(row)
            named = (f"eval_{name}_reward", f"eval_{name}_reward_se") if name else ()
            yield {key: row[key] for key in (*_NEEDED, *named) if key in row}


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


REMEMBERED_EVENTS = 200
IDLE_REFRESHES = 10  # an idle campaign is polled less often by this factor
WHOLE_READS = 32  # runs that a poll reads as a whole, in turn; of the others it reads rows and attempts
ESTIMATE_SHARE = 0.001  # of a core, for estimates of the time left


@dataclass(frozen=True, slots=True)
class WatchedCampaign:
    """The current state of a campaign; the same object until something changes."""

    status: CampaignStatus
    runs: Mapping[str, RunReading]  # by run id, as shown


@dataclass(frozen=True, slots=True)
class View:
    """The result of one poll."""

    campaigns: tuple[WatchedCampaign, ...]  # by directory name
    events: tuple[WatchEvent, ...]  # the latest in chronological order, then each run's last change of batch
    added: tuple[WatchEvent, ...]  # events that are new since the previous poll


class Watcher:
    """Follows a directory of campaigns."""

    def __init__(self, log_dir: Path) -> None:
        """Follow a directory of campaigns, a campaign or a run; nothing is read yet."""
        self._log_dir = log_dir
        self._campaigns: dict[str, _CampaignTracker] = {}
        self._events: deque[WatchEvent] = deque(maxlen=REMEMBERED_EVENTS)
        self._batches: dict[tuple[str, str], WatchEvent] = {}  # the last change of each run's batch

    def refresh(self) -> View:
        """Update everything; raise RecordsError if there is no such directory, or it cannot be listed."""
        for directory in self._new_directories():
            self._campaigns[directory.name] = _CampaignTracker(directory)
        campaigns, added = [], []
        live = sum(tracker.runs_alive for tracker in self._campaigns.values())
        for tracker in sorted(self._campaigns.values(), key=lambda tracker: by_start(tracker.directory)):
            events: list[WatchEvent] = []
            campaigns.append(tracker.refresh(events, live))
            added += [replace(event, campaign=campaigns[-1].status.id) for event in events]
        added.sort(key=attrgetter("at"))
        for event in added:
            if event.kind == "batch":
                self._batches[event.campaign, event.run_id] = event
            else:
                self._events.append(event)
        batches = sorted(self._batches.values(), key=attrgetter("at"))
        return View(tuple(campaigns), (*self._events, *batches), tuple(added))

    def _new_directories(self) -> list[Path]:
        if not self._campaigns:
            return list(find_campaigns(self._log_dir))
        if is_single_run(self._log_dir) or is_campaign(self._log_dir):
            return []
        try:
            names = os.listdir(self._log_dir)  # noqa: PTH208 (names alone are wanted)
        except OSError as error:
            raise RecordsError(f"{self._log_dir}: cannot be listed ({error.strerror})") from error
        for gone in self._campaigns.keys() - names:
            del self._campaigns[gone]
        fresh = [self._log_dir / name for name in names if name not in self._campaigns]
        return [path for path in fresh if is_single_run(path) or is_campaign(path)]


class _CampaignTracker:
    """The state of one campaign."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files = CampaignFiles(directory)
        self._manifest: Manifest | None = None
        self._manifest_mark: object = self  # no mark is this
        self._manifest_problems: list[str] = []
        self._trackers: dict[str, RunTracker] = {}
        self._notices = GrowingFile(self._files.notices)
        self._runs: list[tuple[RunFiles, RunEntry]] = []
        self._run_problems: list[str] = []
        self._until_next = 0
        self._polls = 0
        self._is_changed = False  # whether its orchestrator began or ended, so that any run may have
        self._latest: WatchedCampaign | None = None
        self._time_left: TimeLeft = None, None
        self._next_estimate_s = 0.0

    @property
    def runs_alive(self) -> int:
        """How many runs it has, if any may change at any time."""
        return len(self._runs) if self._latest is not None and self._latest.status.state == "running" else 0

    def refresh(self, events: list[WatchEvent], live: int) -> WatchedCampaign:
        """Return the current state; `live` runs share what one poll reads."""
        self._until_next -= 1
        is_due = self._latest is None or self._until_next <= 0
        if not is_due:
            try:
                has_changed = mark_of(str(self._files.manifest)) != self._manifest_mark
                is_due = has_changed or is_held(self._files.lock)
            except RecordsError:
                is_due = True
        if self._latest is None or is_due:
            turns = math.ceil(max(live, len(self._runs), 1) / WHOLE_READS)
            self._latest = self._read_changes(events, turns)
            self._until_next = 1 if self._latest.status.state == "running" else IDLE_REFRESHES
        return self._latest

    def _read_changes(self, events: list[WatchEvent], turns: int) -> WatchedCampaign:
        """Read what changed; each run is read as a whole in one of so many turns."""
        problems: list[str] = []
        seen: list[RunReading] = []
        now, self._polls = utc_now(), self._polls + 1
        try:
            mark = mark_of(str(self._files.manifest))
            is_new = mark != self._manifest_mark
            if is_new:
                self._manifest_problems, self._manifest_mark = [], mark
                tell = self._manifest_problems.append
                self._manifest = readable(read_manifest, self._files.manifest, tell)
            growth = self._notices.read_growth()
            for notice in map(parse_notice, growth.lines if growth else ()):
                if notice is not None:
                    events.append(WatchEvent(plain(notice.at), "notice", plain(notice.text)))
            problems += self._manifest_problems
            if is_new or self._manifest is None or self._polls % turns == 0:
                self._run_problems = list[str]()
                self._runs = runs_of(self._files, self._manifest, self._run_problems)
            problems += self._run_problems
            for number, (files, entry) in enumerate(self._runs):
                if entry.run_id not in self._trackers:
                    self._trackers[entry.run_id] = RunTracker(files, entry.run_id)
                is_due = self._is_changed or (number + self._polls) % turns == 0
                seen.append(self._trackers[entry.run_id].refresh(entry, events, "" if is_due else now))
        except RecordsError as error:
            problems.append(str(error))
        rows = tuple(run.row for run in seen)
        status = campaign_row(self._files, self._manifest, rows, problems, self._estimate)
        before = self._latest.status if self._latest is not None else status
        self._is_changed = status.is_supervised != before.is_supervised
        shown = zip(seen, status.runs, strict=True)
        runs = {row.run_id: run if run.row is row else replace(run, row=row) for run, row in shown}
        if self._latest is not None and self._latest.status == status and self._latest.runs == runs:
            return self._latest
        return WatchedCampaign(status, runs)

    def _estimate(self, runs: Sequence[RunRow], plan: Manifest, *, is_supervised: bool) -> TimeLeft:
        """Return the time left as estimated last, unless that is long ago for what an estimate costs."""
        is_alive = any(run.state == RunState.RUNNING for run in runs)
        if not is_alive or time.monotonic() >= self._next_estimate_s:
            began_s = time.thread_time()
            self._time_left = time_left_s(runs, plan, is_supervised=is_supervised)
            cost_s = time.thread_time() - began_s if self._next_estimate_s else 0.0  # the first imports
            self._next_estimate_s = time.monotonic() + cost_s / ESTIMATE_SHARE
        return self._time_left
