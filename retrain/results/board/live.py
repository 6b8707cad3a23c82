"""What the board shows of campaigns, brought up to date while anybody looks.

Versions count changes: a page asks for what changed since the version that it has. A directory is looked at
no more often than keeps its cost at a small share of a core.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from retrain.base.errors import ConfigError, RecordsError
from retrain.records.campaign_state import parse_notice
from retrain.records.decision import lines_of, read_looks, verdict_in_words
from retrain.records.files import readable
from retrain.records.layout import CampaignFiles, RunFiles, is_campaign, is_single_run
from retrain.records.lines import read_lines
from retrain.records.run_row import RunRow
from retrain.records.rungs import lines_of_search
from retrain.records.text import (
    MISSING,
    about,
    count_of,
    counts_of,
    dollars,
    first_of,
    format_duration,
    number,
    plain,
)
from retrain.results.status import STATUS_COLUMNS, CampaignStatus, last_steps
from retrain.results.status.watch import View, WatchedCampaign, Watcher, WatchEvent

SHARE = 0.0145  # of a core: 14.5 ms a second, so that answers and what is not counted stay below 20
REFRESH_S = 1.0
BURST_S = 0.04  # of processor time, saved up while nobody looks: short intervals have fewer rows to read
EVENTS = 200  # kept of a campaign
MOST_FAILURES = 100  # shown
NAMED = 3  # holders of permits, in a sentence
Cells = tuple[str, ...]
LIST_COLUMNS = ("campaign", "state", "runs", ">steps", ">time left", ">cost", "started (UTC)")


@dataclass
class Shown:
    """One campaign as the page has it, and at which version each part of it changed."""

    directory: Path
    watched: WatchedCampaign
    version: int  # of the last change
    whole: int  # of the last change of the table's shape: all rows are sent again
    cells: list[Cells]  # of each run, of all columns
    changed: list[int]  # version of each run's row
    has: Cells  # the names of the columns that are shown, "" of others
    events: deque[WatchEvent]  # the latest

    @property
    def status(self) -> CampaignStatus:
        return self.watched.status

    def files_of(self, run: RunRow) -> RunFiles:
        """Return the files of one of its runs."""
        return CampaignFiles(self.directory).existing_run(run.run_id)


@dataclass
class Live:
    """The campaigns of a directory; any number of threads may ask."""

    log_dir: Path
    version: int = 0
    problem: str = ""  # why the directory cannot be read
    campaigns: dict[str, Shown] = field(default_factory=dict)  # by id, oldest first
    _looked_s: float = -math.inf
    _credit_s: float = 0.0  # processor time that may be spent; below 0 once a look took more
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._watcher = Watcher(self.log_dir)
        self._is_one = is_campaign(self.log_dir) or is_single_run(self.log_dir)
        self.refresh()
        if self.problem:
            raise ConfigError(self.problem)

    def refresh(self) -> None:
        """Read what changed, unless that was done a moment ago."""
        with self._lock:
            now_s = time.monotonic()
            credit_s = min(BURST_S, self._credit_s + SHARE * (now_s - self._looked_s))
            if credit_s < 0 or now_s < self._looked_s + REFRESH_S:
                return
            began_s = time.thread_time()
            try:
                self._take(self._watcher.refresh())
                problem = ""
            except (RecordsError, ConfigError) as error:
                problem = str(error)
            if problem != self.problem:
                self.problem, self.version = problem, self.version + 1
            is_first = self._looked_s < 0  # it reads everything
            self._credit_s = credit_s if is_first else credit_s - (time.thread_time() - began_s)
            self._looked_s = now_s

    def _take(self, view: View) -> None:
        version, before, after = self.version + 1, self.campaigns, dict[str, Shown]()
        for watched in view.campaigns:
            shown = before.get(watched.status.id)
            if shown is None or shown.watched is not watched:
                directory = self.log_dir if self._is_one else self.log_dir / watched.status.id
                shown = _shown(directory, watched, shown, version)
                shown.events.extend(event for event in view.added if event.campaign == watched.status.id)
            after[watched.status.id] = shown
        if list(after) != list(before) or any(shown.version == version for shown in after.values()):
            self.version = version
        self.campaigns = after


def _shown(directory: Path, watched: WatchedCampaign, before: Shown | None, version: int) -> Shown:
    runs, had = watched.status.runs, before.status.runs if before else ()
    cells, changed = list[Cells](), list[int]()
    for place, run in enumerate(runs):
        if before is not None and place < len(had) and had[place] is run:
            row = before.cells[place]
        else:
            row = tuple(column.cell(run) for column in STATUS_COLUMNS)
        is_same = before is not None and place < len(had) and before.cells[place] == row
        cells.append(row)
        changed.append(before.changed[place] if before is not None and is_same else version)
    has, last = [], last_steps(runs)
    for place, column in enumerate(STATUS_COLUMNS):
        if not column.is_optional or any(row[place] for row in cells):
            name = column.name.format(last=last)
            has.append(f">{name}" if column.is_right else name)
        else:
            has.append("")
    is_alike = before is not None and before.has == tuple(has) and len(before.cells) == len(cells)
    whole = before.whole if before is not None and is_alike else version
    events = before.events if before else deque[WatchEvent](maxlen=EVENTS)
    return Shown(directory, watched, version, whole, cells, changed, tuple(has), events)


def listed(live: Live, since: int) -> dict[str, Any]:
    """Return the table of campaigns: rows that changed since a version."""
    rows = {}
    for name, shown in live.campaigns.items():
        status = shown.status
        if shown.version > since:
            rows[name] = [
                name,
                status.state,
                counts_of(run.state for run in status.runs) or "none",
                f"{status.steps_done:,}/{status.steps_total or '?'}",
                MISSING if status.eta_s is None else about(status.eta_s),
                _money(status),
                _when(status.started_at),
            ]
    order = list(live.campaigns)[::-1]  # the newest first
    return {"columns": LIST_COLUMNS, "order": order, "rows": rows, "problem": live.problem}


def summary(shown: Shown, since: int) -> dict[str, Any]:
    """Return a campaign's state and its table of runs: rows that changed since a version."""
    status, sends_all = shown.status, since < shown.whole
    kept = [place for place, name in enumerate(shown.has) if name]
    rows = {
        place: [cells[column] for column in kept]
        for place, (cells, changed) in enumerate(zip(shown.cells, shown.changed, strict=True))
        if sends_all or changed > since
    }
    return {
        "id": status.id,
        "state": status.state,
        "done": status.steps_done,
        "total": status.steps_total,
        "lines": list(_lines(status)),
        "problem": status.problem,
        "columns": [shown.has[column] for column in kept],
        "rows": rows,
        "whole": sends_all,
        "run_ids": [run.run_id for run in status.runs] if sends_all else [],
        "of": [run.condition for run in status.runs] if sends_all else [],
        "conditions": list(dict.fromkeys(run.condition for run in status.runs)),
        "can_stop": status.is_supervised or status.state == "running",
        "resume_with": status.resume_with,
    }


def _lines(status: CampaignStatus) -> Iterator[str]:
    """Iterate over what is left, what it costs and what holds it up, a sentence each."""
    states = counts_of(run.state for run in status.runs) or "no runs yet"
    yield f"{states}; started {_when(status.started_at)} UTC"
    if status.eta_s is not None:
        late = "" if status.eta_p90_s is None else f" (P90 {about(status.eta_p90_s)})"
        yield f"about {about(status.eta_s)} left{late}"
    if status.cost_usd is not None:
        yield f"cost {_money(status)}"
    if status.expected is not None and status.expected.actual_s is not None:
        yield f"took {about(status.expected.actual_s)}"
    if status.stopped:
        yield f"stopped by itself: {status.stopped}"
    if permits := status.permits:
        held = [f"{one.label or one.pid} for {format_duration(one.held_s)}" for one in permits.holders]
        who = f" ({first_of(held, NAMED)})" if held else ""
        yield f"permits: {len(held)} of {permits.permits} held{who}, {permits.waiting} waiting"
    if status.resume_with and status.state == "running":
        yield "its orchestrator has exited: workers continue, but no run is started or retried"
    for run in status.runs:
        if run.detail:
            yield f"{run.name} {run.phase}: {run.detail}"
            break


def _when(at: str) -> str:
    """Return a time of the records without its parts of seconds."""
    return plain(at)[:19].replace("T", " ")


def _money(status: CampaignStatus) -> str:
    if status.cost_usd is None:
        return MISSING
    if status.budget_usd is None:
        return dollars(status.cost_usd)
    left = max(0.0, status.budget_usd - status.cost_usd)
    return f"{dollars(status.cost_usd)}, {dollars(left)} left"


def decisions(shown: Shown) -> dict[str, Any]:
    """Return what `[decision]` and `[campaign.search]` have found so far, in sentences and by rung."""
    searched, decision = shown.status.searched, shown.status.decision
    tables = []
    if searched is not None and searched.rungs:
        columns = ["condition", *(f">step {rung.step}" for rung in searched.rungs), "outcome"]
        rows = []
        for name in dict.fromkeys(chain(*(rung.scores for rung in searched.rungs))):
            dropped = [rung.step for rung in searched.rungs if name in rung.scores and name not in rung.kept]
            outcome = f"dropped at step {dropped[0]}" if dropped else "went on"
            outcome = "won" if name == searched.winner else outcome
            rows.append([plain(name), *(number(rung.scores.get(name)) for rung in searched.rungs), outcome])
        tables.append({"title": f"Search: {plain(searched.metric)}", "columns": columns, "rows": rows})
    if decision is not None and decision.conditions:
        columns = [
            "condition",
            "verdict",
            ">seeds",
            ">difference",
            ">from",
            ">to",
            ">p",
            ">rung",
            "why no more",
        ]
        figures = ("difference", "low", "high", "p_value")
        rows = [
            [
                plain(one.condition),
                plain(verdict_in_words(one.verdict, decision.metric, decision.reference)),
                str(one.seeds),
                *(number(getattr(one, name)) for name in figures),
                f"{one.rung:g}" if one.rung else "",
                plain(one.reason),
            ]
            for one in decision.conditions
        ]
        tables.append({"title": f"Decision: {plain(decision.metric)}", "columns": columns, "rows": rows})
        looks = readable(read_looks, CampaignFiles(shown.directory).looks)
        rounds = [
            [
                str(at),
                ", ".join(f"{plain(name)}: {count_of(seeds, 'seed')}" for name, seeds in one.asked.items()),
                str(len(one.values)),
                ", ".join(f"{plain(each.condition)} {each.verdict}" for each in one.decided),
                first_of([plain(name) for name in one.promoted]),
            ]
            for at, one in enumerate(looks.rounds if looks else (), 1)
        ]
        if rounds:
            columns = [">look", "asked for", ">new values", "decided", "go on to the next rung"]
            tables.append({"title": "Looks at the results", "columns": columns, "rows": rounds})
    lines = [*lines_of_search(searched), *lines_of(decision)]
    return {
        "lines": lines or ["This campaign has neither [decision] nor [campaign.search]."],
        "tables": tables,
    }


def notices(shown: Shown) -> dict[str, Any]:
    """Return the runs that failed, and the latest notices and events, the newest first."""
    failures = [
        {"id": run.run_id, "name": run.name, "state": run.state, "message": run.message}
        for run in shown.status.runs
        if run.ended_badly
    ]
    failures = failures[:MOST_FAILURES]
    path = CampaignFiles(shown.directory).notices
    written = filter(None, map(parse_notice, readable(lambda path: [*read_lines(path)], path) or ()))
    rows = [[_when(one.at), "notice", "", plain(one.text, 500)] for one in written][-EVENTS:]
    rows += [[_when(one.at), one.kind, one.name, one.text] for one in shown.events if one.kind != "notice"]
    return {"failures": failures, "notices": sorted(rows, reverse=True)[:EVENTS]}
