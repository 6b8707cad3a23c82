"""One orchestrator on one campaign: lock, permits, supervision, manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from retrain import registry
from retrain.campaign.admission import admission_of
from retrain.campaign.endings import Ending
from retrain.campaign.events import Observer
from retrain.campaign.rollup import RollUp
from retrain.campaign.stop import asked_to_stop, withdraw_request
from retrain.campaign.supervise import Supervisor
from retrain.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_RUN_FAILED, LaunchError, RecordsError
from retrain.launchers import Launcher
from retrain.plan.matrix import Plan, RunPlan
from retrain.records.atomic import remove_leftovers
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.locks import HeldLock, hold, holder
from retrain.records.manifest import (
    UNREADABLE,
    Manifest,
    PlannedRun,
    new_manifest,
    read_manifest,
    with_plan,
)
from retrain.records.run_state import RunState
from retrain.semaphore import FileSemaphore, lock_sharing_problem

SHOWN_RUNS = 5  # named in a notice


@dataclass(frozen=True)
class Outcome:
    """How a campaign ended."""

    directory: Path
    states: Mapping[str, RunState]  # of every run, by run id
    was_stopped: bool

    @property
    def exit_code(self) -> int:
        """0 all done; 130 stopped; 4 at least one run failed."""
        left = [state for state in self.states.values() if state is not RunState.DONE]
        if not left:
            return EXIT_DONE
        bad = [s for s in left if s not in (RunState.INTERRUPTED, RunState.PENDING)]
        return EXIT_RUN_FAILED if bad and not self.was_stopped else EXIT_INTERRUPTED


class CampaignRun:
    """One orchestrator's hold on a campaign's directory."""

    def __init__(
        self,
        plan: Plan,
        files: CampaignFiles,
        observer: Observer,
        catch_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare; nothing is touched yet.

        Args:
            plan: what is to run.
            files: the campaign's.
            observer: is told what happens.
            catch_up: makes the runs' files say what the plan says; called once the campaign is ours.
        """
        self._plan = plan
        self._files = files
        self._observer = observer
        self._catch_up = catch_up
        self._supervisor: Supervisor | None = None
        self._asked_to_stop = 0  # before there was a supervisor to tell

    @property
    def plan(self) -> Plan:
        """What is to run."""
        return self._plan

    @property
    def directory(self) -> Path:
        """Where the campaign's files lie."""
        return self._files.directory

    def files_of(self, run_id: str) -> RunFiles:
        """Where a run's files lie."""
        return RunFiles(self._files.directory) if self._plan.is_single_run else self._files.run(run_id)

    def execute(self, retry_failed: bool = False) -> Outcome:
        """Run what is missing.

        Args:
            retry_failed: run only what failed; otherwise failed runs are left alone.

        Raises:
            LaunchError: another orchestrator holds the campaign, or the launcher cannot start.
            RecordsError: the directory cannot be written.
        """
        with self._lock():
            withdraw_request(self._files)
            remove_leftovers(self._files.directory)
            self._catch_up()
            roll_up = RollUp(self._manifest(), self._files.manifest, self.files_of)
            roll_up.write()
            states = self._states(roll_up)
            todo = [r for r in self._plan.runs if _is_wanted(states[r.run_id], retry_failed)]
            alive = [r for r in self._plan.runs if states[r.run_id] is RunState.RUNNING]
            self._say_what_is_left_alone(states, todo)
            self._open_permits()
            self._observer.begun(self._files, todo + alive, self._plan.workers)
            supervisor = self._supervisor = self._supervisor_with(roll_up)
            supervisor.supervise(todo, alive)
            self._write_last(roll_up)
            return Outcome(self._files.directory, self._states(roll_up), supervisor.was_stopped)

    def stop(self, *, now: bool = False) -> None:
        """Ask the campaign to stop; for signal handlers."""
        self._asked_to_stop = max(self._asked_to_stop, 2 if now else 1)
        if self._supervisor is not None:
            self._supervisor.stop(now=now)

    def _supervisor_with(self, roll_up: RollUp) -> Supervisor:
        launcher: Launcher = registry.find("launchers", self._plan.campaign.launcher)()
        return Supervisor(
            self._plan.campaign,
            admission_of(self._plan),
            launcher,
            self.files_of,
            _ManifestKeeper(self._observer, roll_up),
            lambda: max(self._asked_to_stop, asked_to_stop(self._files)),
        )

    def _write_last(self, roll_up: RollUp) -> None:
        try:
            roll_up.write(ended=True)
        except RecordsError as error:  # a copy of what the runs say: no reason to hide how they ended
            self._observer.notice(str(error))

    def _states(self, roll_up: RollUp) -> dict[str, RunState]:
        states = {}
        for entry in roll_up.entries():
            if entry.state == UNREADABLE:  # one run's damage is no reason to hold up the others
                self._observer.notice(f"{entry.run_id} is left alone: {entry.message}")
            states[entry.run_id] = RunState.FAILED if entry.state == UNREADABLE else RunState(entry.state)
        return states

    def _say_what_is_left_alone(self, states: Mapping[str, RunState], todo: Sequence[RunPlan]) -> None:
        wanted = {run.run_id for run in todo}
        counts = Counter(state for run_id, state in states.items() if run_id not in wanted)
        if counts[RunState.DONE]:
            self._observer.notice(f"{counts[RunState.DONE]} finished runs are skipped")
        if counts[RunState.FAILED]:
            self._observer.notice(
                f"{counts[RunState.FAILED]} failed runs are left alone; --failed runs them again"
            )
        alive = [run_id for run_id, state in states.items() if state is RunState.RUNNING]
        if alive:
            more = f" and {len(alive) - SHOWN_RUNS} more" if len(alive) > SHOWN_RUNS else ""
            self._observer.notice(
                f"{len(alive)} runs are alive and adopted: {', '.join(alive[:SHOWN_RUNS])}{more}"
            )

    def _lock(self) -> HeldLock:
        lock = hold(self._files.lock)
        if lock is None:
            raise LaunchError(
                f"{self._files.directory}: is supervised by {holder(self._files.lock)}; "
                f"watch it with `retrain status {self._files.directory}`"
            )
        return lock

    def say(self, text: str) -> None:
        """Tell whoever watches."""
        self._observer.notice(text)

    def _manifest(self) -> Manifest:
        planned = _planned_runs(self._plan)
        found = read_manifest(self._files.manifest)
        if found is not None:
            return with_plan(found, self._plan.config_hash, planned)
        shared = [str(d) for d, _, is_shared in _permit_directories(self._plan, self._files) if is_shared]
        return new_manifest(self._plan.name, self._plan.config_hash, planned, Path.cwd(), shared)

    def _open_permits(self) -> None:
        for directory, permits, is_shared in _permit_directories(self._plan, self._files):
            problem = lock_sharing_problem(directory)
            if problem:
                self._observer.notice(f"{problem} Permits will hold on this machine only.")
            semaphore = FileSemaphore(directory, permits, allow_unshared=True)
            if semaphore.permits == permits or self._plan.runs[0].config.backend.adapts_permits:
                continue
            if is_shared:
                self._observer.notice(
                    f"{directory} is shared and has {semaphore.permits} permits, not {permits}"
                )
            else:
                semaphore.set_permits(permits)


class _ManifestKeeper:
    """Passes events on, and keeps the manifest fresh."""

    def __init__(self, observer: Observer, roll_up: RollUp) -> None:
        self._observer = observer
        self._roll_up = roll_up
        self.begun = observer.begun
        self.notice = observer.notice

    def started(self, run: RunPlan) -> None:
        self._observer.started(run)
        self._roll_up.changed(run.run_id)

    def retrying(self, run: RunPlan, ending: Ending, delay_s: float) -> None:
        self._observer.retrying(run, ending, delay_s)
        self._roll_up.changed(run.run_id)

    def ended(self, run: RunPlan, ending: Ending, tail: Sequence[str]) -> None:
        self._observer.ended(run, ending, tail)
        self._roll_up.changed(run.run_id)
        try:
            self._roll_up.keep()
        except RecordsError as error:
            self._observer.notice(str(error))


def _is_wanted(state: RunState, retry_failed: bool) -> bool:
    if retry_failed:
        return state is RunState.FAILED
    return state not in (RunState.DONE, RunState.FAILED, RunState.RUNNING)


def _planned_runs(plan: Plan) -> tuple[PlannedRun, ...]:
    """Give a plan's runs as a manifest names them."""
    return tuple(PlannedRun(r.run_id, r.condition, r.seed, r.max_steps, r.config_hash) for r in plan.runs)


def _permit_directories(plan: Plan, files: CampaignFiles) -> list[tuple[Path, int, bool]]:
    found: dict[Path, tuple[int, bool]] = {}
    for run in plan.runs:
        backend = run.config.backend
        directory = Path(backend.throttle_dir) if backend.throttle_dir else files.permits
        found[directory] = (backend.first_permits, bool(backend.throttle_dir))
    return [(directory, permits, shared) for directory, (permits, shared) in found.items()]
