"""Keeps a campaign's records fresh while runs come and go: manifest.json, notices.jsonl, and finished runs'.

The manifest is written as a whole, so it waits until a twentieth of the runs have changed: the cost grows
with the changes, not with changes times runs. A stale one does no harm: `status`, `report` and `resume` read
the runs themselves.

A finished run may still need something. Loggers lack rows if a tool was away or too slow when the run ended.
Of a run whose metrics.jsonl changed afterwards nothing is deleted: its files are kept as
`metrics.jsonl.damaged` and `checkpoints.damaged`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from retrain.base.clock import utc_now
from retrain.base.errors import DamagedRecordError, RecordsError
from retrain.base.locks import hold
from retrain.base.redaction import redacted
from retrain.campaign import Observer
from retrain.campaign.alerts import Alerts
from retrain.campaign.endings import Ending
from retrain.campaign.strategies import Request
from retrain.config.files import KEY, state_of
from retrain.control.machine import cpu_capacity
from retrain.plan.matrix import Plan, RunPlan
from retrain.records.campaign_state import NoticeBook
from retrain.records.files import readable, remove_file, set_aside
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.manifest import (
    Expectation,
    Manifest,
    new_manifest,
    updated_entry,
    with_plan,
    write_manifest,
)
from retrain.records.metrics import require_sealed
from retrain.records.run_row import RunEntry
from retrain.records.run_state import UNREADABLE, RunState, end_as_done, read_attempts, read_done
from retrain.records.text import count_of

EVERY_S = 2.0  # at least between two writes
SHARE = 0.05  # of the runs, to have changed: so a change costs the writing of some twenty entries


def manifest_of(plan: Plan, known: Manifest | None, shared_permits: Sequence[str]) -> Manifest:
    """Return a campaign's manifest, completed from its plan; a new one if none is known."""
    planned = [run.planned for run in plan.runs]
    manifest = known or new_manifest(plan.name, plan.config_hash, planned, Path.cwd(), shared_permits)
    return replace(
        with_plan(manifest, plan.config_hash, planned),
        added_seeds=len(plan.added_seeds),
        adapters=lineage(plan),
        budget_usd=plan.runs[0].config.budget.usd,
        workers=plan.workers,
        stagger_s=plan.campaign.stagger_seconds,
        shared_cores=plan.room(cpu_capacity()),
    )


def lineage(plan: Plan) -> dict[str, dict[str, str]]:
    """Return what each condition starts from, by name and by content; none for those that start anew.

    Content is a digest of a file, and the path of what an API has.
    """
    starts = {}
    for condition, run in plan.first_runs.items():
        if adapter := run.config.model.adapter:
            content = run.config.run.files.get(KEY, "") if run.config.run else ""
            start = {"adapter": adapter, "digest": content, "state": state_of(adapter)}
            starts[condition] = {key: value for key, value in start.items() if value}
    return starts


class RollUp:
    """A campaign's manifest; for the holder of its lock."""

    def __init__(
        self,
        manifest: Manifest,
        files: CampaignFiles,
        notice: Callable[[str], None],
        on_disk: Manifest | None = None,
        *,
        decides: bool = False,
    ) -> None:
        """Look at all runs at the next write; `decides`: by them, so each must be readable for now.

        `on_disk` is the manifest as it was read.
        """
        self._decides = decides
        self.manifest = manifest
        self.files = files
        self.notice = notice
        self._places = {run.run_id: i for i, run in enumerate(manifest.runs)}
        self._changed = set(self._places)
        self._written_at = float("-inf")
        self._on_disk = on_disk  # later as written last
        self.shown: Collection[str] = self._places  # further runs may never be needed

    def changed(self, run_id: str) -> None:
        """Look at a run again, at the next write."""
        self._changed.add(run_id)

    def entries(self) -> tuple[RunEntry, ...]:
        """Look at every run that changed, and return all entries.

        Raises RecordsError if one cannot be read for now, and the campaign decides: that would be final.
        """
        if self._changed:
            runs = list(self.manifest.runs)
            for run_id in self._changed:
                place = self._places[run_id]
                runs[place] = updated_entry(runs[place], self.files.run(run_id), raises=self._decides)
            self._changed.clear()
            self.manifest = replace(self.manifest, runs=tuple(runs))
        return self.manifest.runs

    def as_shown(self) -> Manifest:
        """Return the manifest with the runs that readers see."""
        runs = tuple(run for run in self.entries() if run.run_id in self.shown)
        return replace(self.manifest, runs=runs)

    def see_to_damaged(self, *, redo: bool) -> None:
        """Leave runs with damaged records alone, or prepare their rerun: one does not hold up the others."""
        for entry in self.entries():
            if entry.state != UNREADABLE:
                continue
            if redo and set_aside_changed(self.files.run(entry.run_id)):
                self.changed(entry.run_id)
                self.notice(
                    f"{entry.run_id} runs again from its start: its metrics.jsonl changed after it had "
                    "finished, and is kept as metrics.jsonl.damaged"
                )
            else:
                self.notice(f"{entry.run_id} is left alone: {entry.message}")

    def expect(self, expected: Expectation) -> None:
        """Set how long the campaign is expected to take, or took."""
        self.manifest = replace(self.manifest, expected=expected)

    def take(self, request: Request) -> None:
        """Set what a campaign's strategy has found, and which runs readers see."""
        self._changed.update(request.finished, request.promoted)
        self.manifest = replace(self.manifest, searched=request.searched, decision=request.decision)
        self.shown = request.shown

    def keep(self) -> None:
        """Write if the last write is long enough ago and enough has changed since."""
        is_enough = len(self._changed) >= SHARE * len(self._places)
        if is_enough and time.monotonic() - self._written_at >= EVERY_S:
            self.refresh()

    def begin(self) -> None:
        """Write unless the file says the same; until a run starts, the campaign ended when it did."""
        self._write(self.manifest.ended_at, self.manifest.exit_code)

    def refresh(self, *, ended: bool = False, exit_code: int | None = None) -> None:
        """Write now; a problem is told, because the manifest only repeats the runs' records."""
        try:
            self.write(ended=ended, exit_code=exit_code)
        except RecordsError as error:
            self.notice(str(error))

    def write(self, *, ended: bool = False, exit_code: int | None = None) -> None:
        """Write now; after a RecordsError, the manifest on disk is an older one."""
        ended_at = ""
        if ended:  # when the last of finished runs did, also if that was long ago
            runs = self.as_shown().runs
            is_done = all(run.state == RunState.DONE for run in runs)
            ended_at = max((run.ended_at for run in runs if is_done), default="") or utc_now()
        self._write(ended_at, exit_code)

    def _write(self, ended_at: str, exit_code: int | None) -> None:
        self.manifest = replace(self.manifest, ended_at=ended_at, exit_code=exit_code)
        manifest = self.as_shown()
        if manifest != self._on_disk:
            write_manifest(self.files.manifest, manifest)
            self._on_disk = manifest
            self._written_at = time.monotonic()


class RecordingObserver(Observer):
    """Forwards events, keeps the manifest fresh, records notices, and alerts of failures."""

    def __init__(self, observer: Observer, roll_up: RollUp, notices: NoticeBook, alerts: Alerts) -> None:
        self._observer = observer
        self._alerts = alerts
        self._roll_up = roll_up
        self._notices = notices

    def notice(self, text: str) -> None:
        text = redacted(text)
        self._observer.notice(text)
        with contextlib.suppress(RecordsError):  # a full disk is reported by what needs it
            self._notices.write(text)

    def started(self, run: RunPlan) -> None:
        self._observer.started(run)
        self._roll_up.changed(run.run_id)

    def retrying(self, run: RunPlan, ending: Ending, delay_s: float) -> None:
        self._observer.retrying(run, ending, delay_s)
        self._roll_up.changed(run.run_id)

    def ended(self, run: RunPlan, ending: Ending, tail: Sequence[str]) -> None:
        self._observer.ended(run, ending, tail)
        if ending.state not in (RunState.DONE, RunState.INTERRUPTED):
            self._alerts.failed(run, ending)
        self._roll_up.changed(run.run_id)
        self._roll_up.keep()


def deliver_missing(finished: Sequence[RunPlan], roll_up: RollUp, is_stopped: Callable[[], bool]) -> None:
    """Log the rows that loggers lack of finished runs, run by run; for the holder of the campaign's lock."""
    logged = [run for run in finished if run.config.logging.loggers]
    if not logged:
        return
    from retrain.trainer.logger_threads import deliver, is_behind  # not at the top: few campaigns get here

    behind = []
    for run in logged:
        files = roll_up.files.run(run.run_id)
        done = read_done(files.done)
        if done is not None and is_behind(run.config, files, done.result):
            behind.append(run)
    if behind:
        roll_up.notice(f"logging the missing rows of {count_of(len(behind), 'finished run')}")
    for run in behind:
        if is_stopped():
            return
        roll_up.changed(run.run_id)
        files = roll_up.files.run(run.run_id)
        if (lock := hold(files.lock)) is None:
            continue  # its worker still runs
        with lock:
            done, attempts = read_done(files.done), read_attempts(files.attempts)
            if done is not None and attempts:
                number = attempts[-1].number
                lacking = deliver(run.config, files, roll_up.files, number, done.result, is_stopped)
                end_as_done(files.attempts, attempts[-1], lacking)


def set_aside_changed(files: RunFiles) -> bool:
    """Prepare a run with changed rows to run again, and return whether they had changed.

    For the holder of the campaign's lock. If that is unknown, the run is left as it is.
    """
    done = readable(read_done, files.done)
    try:
        if done is not None and done.metrics is not None:
            require_sealed(files.metrics, done.metrics)
        return False
    except DamagedRecordError:
        for path in (files.checkpoints, files.metrics):
            set_aside(path)
        remove_file(files.done)  # last: a kill before this repeats all of it
        return True
    except RecordsError:
        return False
