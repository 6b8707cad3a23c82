"""Follows a log directory: the rows of `status`, updated by reading only what changed."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from retrain.base.errors import RecordsError
from retrain.base.locks import is_held
from retrain.records.campaign_state import parse_notice
from retrain.records.files import readable
from retrain.records.layout import CampaignFiles, by_start, find_campaigns, is_campaign, is_single_run
from retrain.records.lines import GrowingFile, mark_of
from retrain.records.manifest import Manifest, read_manifest
from retrain.records.run_row import RunReading
from retrain.records.text import plain
from retrain.results.status import CampaignStatus, campaign_row, runs_of
from retrain.results.status.tracking import RunTracker, WatchEvent

REMEMBERED_EVENTS = 200
IDLE_REFRESHES = 10  # an idle campaign is polled less often by this factor


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
        for tracker in sorted(self._campaigns.values(), key=lambda tracker: by_start(tracker.directory)):
            events: list[WatchEvent] = []
            campaigns.append(tracker.refresh(events))
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
        self._until_next = 0
        self._now: WatchedCampaign | None = None

    def refresh(self, events: list[WatchEvent]) -> WatchedCampaign:
        self._until_next -= 1
        is_due = self._now is None or self._until_next <= 0
        if not is_due:
            try:
                has_changed = mark_of(str(self._files.manifest)) != self._manifest_mark
                is_due = has_changed or is_held(self._files.lock)
            except RecordsError:
                is_due = True
        if self._now is None or is_due:
            self._now = self._read_changes(events)
            self._until_next = 1 if self._now.status.state == "running" else IDLE_REFRESHES
        return self._now

    def _read_changes(self, events: list[WatchEvent]) -> WatchedCampaign:
        problems: list[str] = []
        seen: list[RunReading] = []
        try:
            mark = mark_of(str(self._files.manifest))
            if mark != self._manifest_mark:
                self._manifest_problems, self._manifest_mark = [], mark
                tell = self._manifest_problems.append
                self._manifest = readable(read_manifest, self._files.manifest, tell)
            growth = self._notices.read_growth()
            for notice in map(parse_notice, growth.lines if growth else ()):
                if notice is not None:
                    events.append(WatchEvent(plain(notice.at), "notice", plain(notice.text)))
            problems += self._manifest_problems
            for files, entry in runs_of(self._files, self._manifest, problems):
                if entry.run_id not in self._trackers:
                    self._trackers[entry.run_id] = RunTracker(files, entry.run_id)
                seen.append(self._trackers[entry.run_id].refresh(entry, events))
        except RecordsError as error:
            problems.append(str(error))
        status = campaign_row(self._files, self._manifest, tuple(run.row for run in seen), problems)
        shown = zip(seen, status.runs, strict=True)
        runs = {row.run_id: run if run.row is row else replace(run, row=row) for run, row in shown}
        if self._now is not None and self._now.status == status and self._now.runs == runs:
            return self._now
        return WatchedCampaign(status, runs)
