"""Starts a campaign, or goes on with one: directory, permits, lock, supervision, manifest."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from retrain import registry
from retrain.campaign.admission import admission_of
from retrain.campaign.endings import Ending
from retrain.campaign.events import Observer, Silent
from retrain.campaign.supervise import Supervisor
from retrain.config.load import load_config
from retrain.config.resolve import as_tables
from retrain.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_RUN_FAILED, LaunchError, RecordsError
from retrain.launchers import Launcher
from retrain.plan.matrix import Plan, RunPlan, plan_runs
from retrain.plan.preflight import preflight
from retrain.records.atomic import read_json, remove_leftovers, write_atomic, write_json
from retrain.records.files import make_new_directory
from retrain.records.layout import CampaignFiles, RunFiles, create_directory
from retrain.records.locks import HeldLock, hold, holder
from retrain.records.manifest import (
    Manifest,
    PlannedRun,
    new_manifest,
    read_manifest,
    refresh,
    write_manifest,
)
from retrain.records.run_state import RunState, run_state
from retrain.semaphore import FileSemaphore, lock_sharing_problem

MANIFEST_EVERY_S = 2.0  # the roll-up is rebuilt at most this often; it costs a look at every run


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

    def __init__(self, plan: Plan, files: CampaignFiles, observer: Observer) -> None:
        self._plan = plan
        self._files = files
        self._observer = observer
        self._manifest_written_at = 0.0
        self._supervisor: Supervisor | None = None

    def directory_of(self, run: RunPlan) -> Path:
        """Where a run's files lie."""
        return self._files.directory if self._plan.is_single_run else self._files.run(run.run_id).directory

    def execute(self, retry_failed: bool = False) -> Outcome:
        """Run what is missing.

        Args:
            retry_failed: run only what failed; otherwise failed runs are left alone.

        Raises:
            LaunchError: another orchestrator holds the campaign, or the launcher cannot start.
        """
        with self._lock():
            remove_leftovers(self._files.directory)
            manifest = self._manifest()
            states = self._states()
            todo = [r for r in self._plan.runs if _is_wanted(states[r.run_id], retry_failed)]
            alive = [r for r in self._plan.runs if states[r.run_id] is RunState.RUNNING]
            self._open_permits()
            launcher: Launcher = registry.find("launchers", self._plan.campaign.launcher)()
            watcher = _ManifestKeeper(self._observer, lambda: self._keep(manifest))
            supervisor = self._supervisor = Supervisor(
                self._plan.campaign, admission_of(self._plan), launcher, self.directory_of, watcher
            )
            self._observer.begun(self._files, todo + alive, self._plan.workers)
            try:
                supervisor.supervise(todo, alive)
            finally:
                write_manifest(self._files.manifest, refresh(manifest, self._files, ended=True))
            return Outcome(self._files.directory, self._states(), supervisor.was_stopped)

    def stop(self, *, now: bool = False) -> None:
        """Ask the campaign to stop; for signal handlers."""
        if self._supervisor is not None:
            self._supervisor.stop(now=now)

    def _states(self) -> dict[str, RunState]:
        return {r.run_id: run_state(RunFiles(self.directory_of(r)), r.config_hash) for r in self._plan.runs}

    def _lock(self) -> HeldLock:
        lock = hold(self._files.lock)
        if lock is None:
            raise LaunchError(
                f"{self._files.directory}: is supervised by {holder(self._files.lock)}; "
                f"watch it with `retrain status {self._files.directory}`"
            )
        return lock

    def _manifest(self) -> Manifest:
        planned = tuple(
            PlannedRun(r.run_id, r.condition, r.seed, r.max_steps, r.config_hash) for r in self._plan.runs
        )
        found = read_manifest(self._files.manifest)
        shared = [str(d) for d, _, is_shared in _permit_directories(self._plan, self._files) if is_shared]
        manifest = found or new_manifest(self._plan.name, self._plan.config_hash, planned, Path.cwd(), shared)
        write_manifest(self._files.manifest, refresh(manifest, self._files))
        return manifest

    def _keep(self, manifest: Manifest) -> None:
        if time.monotonic() - self._manifest_written_at >= MANIFEST_EVERY_S:
            write_manifest(self._files.manifest, refresh(manifest, self._files))
            self._manifest_written_at = time.monotonic()

    def _open_permits(self) -> None:
        for directory, permits, is_shared in _permit_directories(self._plan, self._files):
            problem = lock_sharing_problem(directory)
            if problem:
                self._observer.notice(f"{problem} Permits will hold on this machine only.")
            semaphore = FileSemaphore(directory, permits, allow_unshared=True)
            if semaphore.permits == permits:
                continue
            if is_shared:
                self._observer.notice(
                    f"{directory} is shared and has {semaphore.permits} permits, not {permits}"
                )
            else:
                semaphore.set_permits(permits)


def start(config_path: Path, overrides: Sequence[str] = (), observer: Observer | None = None) -> CampaignRun:
    """Check a file, make its campaign's directory and every run's run.toml.

    Raises:
        ConfigError: every problem of the file; nothing was created.
        RecordsError: the directory cannot be written.
    """
    config = load_config(config_path, overrides)
    plan = plan_runs(config, config_path.name)
    preflight(plan, config_path.name)
    files = CampaignFiles(create_directory(plan.log_dir, plan.name))
    campaign = CampaignRun(plan, files, observer or Silent())
    write_atomic(files.campaign_toml, config_path.read_bytes())
    write_json(_overrides_file(files), {"set": list(overrides)})
    if not plan.is_single_run:
        make_new_directory(files.runs)
    for run in plan.runs:
        _write_run(campaign.directory_of(run), run, files)
    return campaign


def reopen(directory: Path, observer: Observer | None = None) -> CampaignRun:
    """Open an existing campaign as it was given.

    Raises:
        RecordsError: the directory holds no campaign.
        ConfigError: its campaign.toml is not valid any more.
    """
    files = CampaignFiles(directory)
    if not files.campaign_toml.is_file():
        raise RecordsError(f"{directory}: holds no campaign; `retrain status` lists those below logs/")
    overrides = (read_json(_overrides_file(files)) or {}).get("set", [])
    config = load_config(files.campaign_toml, overrides)
    manifest = read_manifest(files.manifest)
    drawn = manifest.runs[0].seed if manifest and manifest.runs else None
    plan = plan_runs(config, manifest.name if manifest else directory.name, drawn)
    campaign = CampaignRun(plan, files, observer or Silent())
    for run in plan.runs:
        if not (campaign.directory_of(run) / "run.toml").exists():
            _write_run(campaign.directory_of(run), run, files)
    return campaign


def run_campaign(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), observer: Observer | None = None
) -> Outcome:
    """Run a campaign file to its end, as `retrain run` does.

    Args:
        path: the TOML file.
        overrides: `section.key=value` each.
        observer: is told what happens.

    Raises:
        ConfigError: every problem of the file; nothing was created.
        LaunchError: nothing could be started.
    """
    return start(Path(path), overrides, observer).execute()


class _ManifestKeeper:
    """Passes events on, and keeps the manifest fresh when something ended."""

    def __init__(self, observer: Observer, keep: Callable[[], None]) -> None:
        self._observer = observer
        self._keep = keep
        self.begun = observer.begun
        self.started = observer.started
        self.retrying = observer.retrying
        self.notice = observer.notice

    def ended(self, run: RunPlan, ending: Ending, tail: Sequence[str]) -> None:
        self._observer.ended(run, ending, tail)
        self._keep()


def _is_wanted(state: RunState, retry_failed: bool) -> bool:
    if retry_failed:
        return state is RunState.FAILED
    return state not in (RunState.DONE, RunState.FAILED, RunState.RUNNING)


def _write_run(directory: Path, run: RunPlan, files: CampaignFiles) -> None:
    if directory != files.directory:
        make_new_directory(directory)
    tables = as_tables(run.config)
    tables["run"] = {**tables["run"], "campaign": files.directory.name}
    write_atomic(directory / "run.toml", tomli_w.dumps(tables))


def _overrides_file(files: CampaignFiles) -> Path:
    return files.directory / "overrides.json"


def _permit_directories(plan: Plan, files: CampaignFiles) -> list[tuple[Path, int, bool]]:
    found: dict[Path, tuple[int, bool]] = {}
    for run in plan.runs:
        backend = run.config.backend
        directory = Path(backend.throttle_dir) if backend.throttle_dir else files.permits
        found[directory] = (backend.max_concurrent, bool(backend.throttle_dir))
    return [(directory, permits, shared) for directory, (permits, shared) in found.items()]
