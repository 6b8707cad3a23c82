"""One orchestrator on one campaign: lock, permits, supervision, manifest."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from retrain.base.clock import utc_now
from retrain.base.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_RUN_FAILED,
    ConfigError,
    LaunchError,
    RecordsError,
    RetrainError,
)
from retrain.base.hide_process import hide
from retrain.base.locks import HeldLock, hold, present_holder
from retrain.campaign import Observer
from retrain.campaign.admission import admission_of, as_planned
from retrain.campaign.alerts import Alerts
from retrain.campaign.endings import Ending
from retrain.campaign.forecast import Forecaster, said
from retrain.campaign.launcher_setup import (
    as_launched,
    assignment_of,
    open_launcher,
    open_permits,
    permit_directories,
    require_left,
)
from retrain.campaign.launchers import Launcher
from retrain.campaign.mirror import Mirror
from retrain.campaign.reconcile import plan_anew, reconcile, write_runs
from retrain.campaign.rollup import RecordingObserver, RollUp, deliver_missing, manifest_of
from retrain.campaign.strategies import Request, Strategy, strategy_of
from retrain.campaign.supervise import Supervisor
from retrain.plan.matrix import Plan, RunPlan
from retrain.plan.preflight import runs_programs
from retrain.records.campaign_state import NoticeBook, ask_to_stop, asked_to_stop
from retrain.records.files import remove_file, remove_leftovers, set_aside
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.manifest import KnownManifest, Manifest, known_manifest
from retrain.records.provenance import Provenance, known_origin, working_directories, write_provenance
from retrain.records.run_state import UNREADABLE, RunState, rename_done
from retrain.records.rungs import is_out
from retrain.records.text import as_typed, count_of, first_of

LEFT_ALONE = frozenset({RunState.DONE, RunState.FAILED, RunState.RUNNING})  # by a plain resume
GOES_ON = (RunState.INTERRUPTED, RunState.DONE)  # endings of a run that has a result, or will have one


@dataclass(frozen=True)
class CampaignOutcome:
    """How a campaign ended."""

    directory: Path
    states: Mapping[str, RunState]  # of every run, by run id
    was_stopped: bool
    manifest: Manifest = field(repr=False)  # as readers see it

    @property
    def exit_code(self) -> int:
        """0 all done; 130 stopped; 4 at least one run failed."""
        states = set(self.states.values()) - {RunState.DONE}
        if not states:
            return EXIT_DONE
        has_failed = states - {RunState.INTERRUPTED, RunState.PENDING} and not self.was_stopped
        return EXIT_RUN_FAILED if has_failed else EXIT_INTERRUPTED


@dataclass(frozen=True)
class Resumption:
    """How a campaign that began earlier continues, and what is brought up to date for that."""

    changes: Sequence[str]  # of its file, by which results differ, and which the user has accepted
    renamed: Mapping[str, str]  # run id -> its former hash, of runs that are the same under another
    writes_origin: bool
    lost: str = ""  # the problem of its origin, if that had to be rebuilt
    keeps_request: bool = False  # an existing request to stop it stands


class Campaign:
    """One orchestrator's hold on a campaign's directory."""

    def __init__(
        self,
        plan: Plan,  # as it continues
        files: CampaignFiles,
        origin: Provenance,  # how it is launched now
        observer: Observer,
        *,
        known: KnownManifest | None = None,  # if that was read already
        resumption: Resumption | None = None,  # if it began earlier
    ) -> None:
        """Hold nothing yet."""
        self.plan = plan
        self.directory = files.directory
        self.notice = observer.notice
        self._files = files
        self._origin = origin
        self._observer = observer
        self._known = known
        self._resumption = resumption
        self._supervisor: Supervisor | None = None
        self._asked_to_stop = 0  # before there was a supervisor
        self._requests_to_stop = 0
        self._endings: dict[str, Ending] = {}  # of all sessions

    def files_of(self, run_id: str) -> RunFiles:
        return self._files.run(run_id)

    def execute(self, retry_failed: bool = False) -> CampaignOutcome:
        """Run what is not done; with `retry_failed` what failed, which is otherwise left alone.

        Raises:
            ConfigError: the load function returned no load.
            LaunchError: another orchestrator holds the campaign, or the launcher cannot start.
            RecordsError: the directory cannot be written, or was removed while runs were alive.
        """
        if any(runs_programs(run.config) for run in self.plan.first_runs.values()):
            hide()  # keys in its environment
        lock = hold(self._files.lock)
        if lock is None:
            raise supervised(self._files)
        with lock:
            before, _ = known_origin(self._files)
            run_ids = (run.run_id for run in self.plan.runs)
            require_left(self._files, before, self.plan.campaign, run_ids, self.notice)
            remove_leftovers(self.directory)
            with self._mirroring(), self._alerting():
                self.catch_up()
                changes = self._resumption.changes if self._resumption else ()
                while (outcome := self._session(lock, changes, retry_failed)) is None:
                    changes, retry_failed = (), False
                if outcome.exit_code == EXIT_DONE:  # no run may need it any more
                    shutil.rmtree(self._files.warm_ups, ignore_errors=True)
                counts = Counter(outcome.states.values())
                states = ", ".join(f"{count} {state}" for state, count in counts.items())
                attempts = sum(run.attempts for run in outcome.manifest.runs)
                self._alerts.look(self.plan, is_last=True)
                what = f"{count_of(len(outcome.states), 'run')}: {states}"
                self._alerts.ended(outcome.exit_code, what, attempts)
            return outcome

    @contextmanager
    def _mirroring(self) -> Iterator[None]:
        """Copy what happens meanwhile, also the last alerts; a further request to stop ends the last copy."""
        self._mirror = Mirror(self._files, self.plan.mirror, self._recorded_notice)
        try:
            yield
        finally:
            before = self._requests_to_stop
            self._mirror.end(lambda: self._requests_to_stop > before, self.notice)

    @contextmanager
    def _alerting(self) -> Iterator[None]:
        """Alert of what happens meanwhile, and of the error that ends it."""
        where = working_directories(self._files, self._origin)[0]
        self._alerts = Alerts(self.plan.campaign, self._files, where, self._recorded_notice)
        try:
            yield
        except RetrainError as error:
            self._alerts.ended(error.exit_code, str(error), utc_now())
            raise
        finally:
            self._alerts.close()

    def _recorded_notice(self, text: str) -> None:
        self.notice(text)
        with suppress(RecordsError):
            NoticeBook(self._files.notices).write(text)

    def catch_up(self) -> None:
        """Bring the files of a campaign that began earlier up to date; for the lock's holder."""
        resumption = self._resumption
        if resumption is None:
            return
        if not resumption.keeps_request:
            remove_file(self._files.stop_request)
        for run in self.plan.runs:
            if run.run_id in resumption.renamed:
                done = self.files_of(run.run_id).done
                rename_done(done, resumption.renamed[run.run_id], run.config_hash)
        write_runs(self.plan, self._files, self._origin, self.notice)
        if resumption.lost:
            self.notice(f"{resumption.lost}; it is rebuilt from the runs")
        if resumption.writes_origin:
            write_provenance(self._files, self._origin)

    def _session(self, lock: HeldLock, changes: Sequence[str], retry_failed: bool) -> CampaignOutcome | None:
        """Run what is not done of the conditions that there are; None if a sampler has added others."""
        roll_up = self._roll_up()
        strategy = strategy_of(self.plan, self._files, roll_up.manifest, self.notice)
        strategy.begin(changes)
        before = self._states(roll_up)
        roll_up.see_to_damaged(redo=retry_failed)
        failed = [] if retry_failed else _failed(before)
        request = self._request(strategy, roll_up, failed)
        roll_up.begin()
        if request.due is not None and not retry_failed:
            if strategy.propose(request.due):  # the plan gets further runs
                files = replace(self._files, directory=self.directory.absolute())
                plan = as_launched(plan_anew(files, self._origin)[0], str(files.campaign_toml))
                self._known = known_manifest(files.manifest, self._known)
                self.plan = reconcile(plan, files, self._origin, self._known.manifest).plan
                write_runs(self.plan, files, self._origin, self.notice)
            return None
        launcher = self._opened(lock)
        states = self._states(roll_up)
        states = before | {run_id: states[run_id] for run_id in request.promoted}  # which were done
        todo, alive = self._shares(request.runs, states, launcher.queued(), retry_failed)
        if todo or alive:
            roll_up.refresh()
        if self._supervisor is None:
            self._report_skipped(roll_up.manifest, todo, alive)
            self._observer.begun(self._files, todo + alive, self.plan.workers)
        else:  # a further session
            self._observer.asked(todo)
        forecaster = Forecaster(self.plan, self._files, roll_up.manifest)
        supervisor = self._supervisor = self._supervisor_with(launcher, roll_up, forecaster, lock)
        try:
            while todo or alive:
                self._endings |= supervisor.supervise(todo, alive)
                todo, alive = [], []
                if strategy.adds_runs:
                    request = self._request(strategy, roll_up, _failed(self._states(roll_up)))
                    roll_up.refresh()
                    if not supervisor.is_stopping:
                        todo, _ = self._shares(request.runs, self._states(roll_up), (), retry_failed=False)
                        ended = {
                            r for r, ending in self._endings.items() if ending.state is not RunState.DONE
                        }
                        ended -= set(request.promoted)
                        todo = [run for run in todo if run.run_id not in ended]
                    self._observer.asked(todo)
        except (LaunchError, ConfigError) as error:
            roll_up.refresh(ended=supervisor.is_over, exit_code=error.exit_code)
            raise
        if request.due is not None and not supervisor.is_stopping:
            return None
        return self._outcome(supervisor, lock, roll_up, before, forecaster)

    def _roll_up(self) -> RollUp:
        """Return the campaign's manifest as it is now; a damaged one is set aside."""
        self._known = known_manifest(self._files.manifest, self._known)
        if self._known.is_damaged:
            aside = set_aside(self._files.manifest)
            self.notice(f"manifest.json was damaged and is rebuilt from the runs; it is kept as {aside.name}")
        shared = [str(d) for d, _, is_shared in permit_directories(self.plan, self._files) if is_shared]
        manifest = manifest_of(self.plan, self._known.manifest, shared)
        decides = self.plan.decision is not None
        return RollUp(manifest, self._files, self.notice, self._known.manifest, decides=decides)

    def _request(self, strategy: Strategy, roll_up: RollUp, failed: Sequence[str]) -> Request:
        """Return what is asked for now; `failed` runs and those that ended here are left alone."""
        over, lost = list(failed), list(failed)
        if self._supervisor is None or not self._supervisor.is_stopping:
            over += [r for r, ending in self._endings.items() if ending.state not in GOES_ON]
            lost += [r for r, ending in self._endings.items() if ending.is_lasting]
        request = strategy.request({entry.run_id: entry for entry in roll_up.entries()}, over, lost)
        roll_up.take(request)
        self._alerts.decided(request.decision)
        return request

    def _opened(self, lock: HeldLock) -> Launcher:
        where = working_directories(self._files, self._origin)[0]
        assignment = assignment_of(self.plan, self._files, where, self.notice)
        launcher = open_launcher(self.plan.campaign.launcher, assignment)
        if launcher.queues:  # another machine may resume it
            lock.renew()
        else:
            open_permits(self.plan, self._files, self.notice)
        return launcher

    def _outcome(
        self,
        supervisor: Supervisor,
        lock: HeldLock,
        roll_up: RollUp,
        before: Mapping[str, RunState],
        forecaster: Forecaster,
    ) -> CampaignOutcome:
        """Complete the records; runs were in the states `before`."""
        if not lock.is_in_place:
            raise RecordsError(
                f"{self.directory}: was removed or replaced while the campaign ran; its runs were "
                "asked to stop, and their records are lost unless you restore the directory"
            )
        finished = [run for run in self.plan.runs if before[run.run_id] is RunState.DONE]
        deliver_missing(finished, roll_up, lambda: self._asked_to_stop > 0)
        states = self._states(roll_up)
        # workers may have ended before they wrote a record
        ended = {r: e.state for r, e in self._endings.items() if e.state is not RunState.DONE}
        states |= {r: state for r, state in ended.items() if states[r] is RunState.PENDING}
        states = {run_id: state for run_id, state in states.items() if run_id in roll_up.shown}
        took = forecaster.ended() if set(states.values()) == {RunState.DONE} else None
        if took is not None:
            roll_up.expect(took)
        outcome = CampaignOutcome(self.directory, states, supervisor.was_stopped, roll_up.manifest)
        roll_up.refresh(ended=True, exit_code=outcome.exit_code)
        return replace(outcome, manifest=roll_up.as_shown())

    def stop(self, *, now: bool = False) -> None:
        """Ask the campaign to stop; for signal handlers."""
        self._requests_to_stop += 1
        self._asked_to_stop = max(self._asked_to_stop, 2 if now else 1)
        if self._supervisor is not None:
            self._supervisor.stop(now=now)

    def _shares(
        self,
        asked: Collection[str],
        states: Mapping[str, RunState],
        queued: Collection[str],
        retry_failed: bool,
    ) -> tuple[list[RunPlan], list[RunPlan]]:
        """Return the runs to launch, and those launched earlier that are still alive or queued."""
        alive = [
            run
            for run in self.plan.runs
            if states[run.run_id] is RunState.RUNNING
            or (run.run_id in queued and states[run.run_id] is not RunState.DONE)
        ]
        taken = {run.run_id for run in alive}
        over = set(RunState) - {RunState.FAILED} if retry_failed else LEFT_ALONE
        left = [run for run in self.plan.runs if states[run.run_id] not in over]
        return [run for run in left if run.run_id in asked and run.run_id not in taken], alive

    def _supervisor_with(
        self, launcher: Launcher, roll_up: RollUp, forecaster: Forecaster, lock: HeldLock
    ) -> Supervisor:
        campaign = self.plan.campaign
        observer = RecordingObserver(self._observer, roll_up, NoticeBook(self._files.notices), self._alerts)

        def poll() -> int:
            is_lost = not lock.is_in_place  # checked every second: records written now would be lost
            expected = None if is_lost else forecaster.update()
            if expected is not None:
                roll_up.expect(expected)
                roll_up.refresh()
                observer.notice(said(expected))
            self._alerts.look(self.plan)
            if (stuck := self._mirror.look()) is not None:
                self._alerts.not_mirrored(stuck)
            return max(self._asked_to_stop, asked_to_stop(self._files), int(is_lost))

        def ask_workers(now: bool) -> None:
            if lock.is_in_place:
                with suppress(RecordsError):  # on a full disk, the cluster alone is asked
                    ask_to_stop(self._files, now=now)

        return Supervisor(
            campaign,
            as_planned(self.plan.workers) if launcher.queues else admission_of(self.plan, self._files.runs),
            launcher,
            self.files_of,
            observer,
            poll,
            ask_workers,
        )

    def _states(self, roll_up: RollUp) -> dict[str, RunState]:
        """Return every run's state; damaged records count as failed."""
        states = {entry.run_id: entry.state for entry in roll_up.entries()}
        return {r: RunState.FAILED if state == UNREADABLE else RunState(state) for r, state in states.items()}

    def _report_skipped(self, manifest: Manifest, todo: Sequence[RunPlan], taken: Sequence[RunPlan]) -> None:
        launched = {run.run_id for run in todo}
        counts = Counter(
            (entry.state, is_out(entry, manifest.searched))
            for entry in manifest.runs
            if entry.run_id not in launched
        )
        if done := counts[RunState.DONE, False] + counts[RunState.DONE, True]:
            self.notice(f"{count_of(done, 'finished run')} skipped")
        if failed := counts[RunState.FAILED, False]:
            self.notice(f"{count_of(failed, 'failed run')} left alone; --failed runs them again")
        if failed := counts[RunState.FAILED, True]:
            self.notice(f"{count_of(failed, 'failed run')} left alone: the search was decided without them")
        alive = [entry.run_id for entry in manifest.runs if entry.state == RunState.RUNNING]
        queued = [run.run_id for run in taken if run.run_id not in alive]
        for what, runs in (("alive", alive), ("still queued by the cluster", queued)):
            if runs:
                self.notice(f"{count_of(len(runs), 'run')} {what} and adopted: {first_of(runs)}")


def _failed(states: Mapping[str, RunState]) -> list[str]:
    return [run_id for run_id, state in states.items() if state is RunState.FAILED]


def supervised(files: CampaignFiles) -> LaunchError:
    """Return an error that names the orchestrator of a campaign whose lock is held."""
    who = present_holder(files.lock) or "another process"
    follow = f"follow it with `retrain status {as_typed(files.directory)}`"
    return LaunchError(f"{files.directory}: is supervised by {who}; {follow}")
