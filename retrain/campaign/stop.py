"""Stops a campaign from anywhere, with or without its orchestrator.

The request is a file that the orchestrator looks for every second, so it also arrives from another machine
that shares the directory. If the orchestrator is dead, `stop` takes its lock and stops its workers. Which
runs to stop is read from the runs themselves: a damaged manifest or origin leaves no worker running.
"""

from __future__ import annotations

import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

from retrain.base.errors import EXIT_INTERRUPTED, LaunchError, RecordsError
from retrain.base.locks import HeldLock, hold, holder, is_held, present_holder, signal_holder
from retrain.base.registry import names
from retrain.campaign.endings import Ending, conclude, ended_attempts
from retrain.campaign.launcher_setup import assignment_for_stopping, open_launcher
from retrain.campaign.launchers import Ended
from retrain.records.campaign_state import ask_to_stop
from retrain.records.files import readable
from retrain.records.layout import CampaignFiles, RunFiles, files_of_runs, open_campaign, recorded_hash
from retrain.records.manifest import read_manifest, refresh, write_manifest
from retrain.records.provenance import known_origin
from retrain.records.run_state import RunState
from retrain.records.text import as_typed, plain

PAUSE_S = 0.1
SHOWN_RUNS = 5  # named one by one


@dataclass(frozen=True)
class Stopped:
    """What a stop found."""

    was_supervised: bool
    workers: tuple[str, ...]  # run ids of workers that were alive


def stop_campaign(
    directory: Path, *, now: bool = False, launcher: str = "", on_wait: Callable[[str], None] = lambda _: None
) -> Stopped:
    """Have every worker save a checkpoint and leave, and wait until they have.

    With `now` they are killed; what they did since their last checkpoint will be done again. `on_wait` shows
    what we wait for. A directory may come from anybody: a launcher that it names by a dotted path is imported
    only if `launcher` names it too. Raises ConfigError if this is no campaign, RecordsError if it cannot be
    written.
    """
    files = open_campaign(directory)
    lock = hold(files.lock)
    was_supervised = lock is None
    lock = lock or _outlast(files, now=now, on_wait=on_wait)
    if lock is None:
        return Stopped(was_supervised, workers=())
    with lock:
        with suppress(RecordsError):  # on a full disk; it is for workers that have not started yet
            ask_to_stop(files, now=now)
        if files.stop_request.exists() and not files.manifest.exists():
            on_wait("it has not run yet; if it is being started now, it stops before its first run")
        try:
            workers = _stop_workers(files, lock, now=now, trusted=launcher, on_wait=on_wait)
            return Stopped(was_supervised, workers)
        except LaunchError as error:
            if not files.stop_request.exists():
                raise
            raise LaunchError(
                f"{error}. The request to stop is recorded: runs that have not started will not start, "
                "and the others save and leave at their next step"
            ) from error


def _outlast(files: CampaignFiles, *, now: bool, on_wait: Callable[[str], None]) -> HeldLock | None:
    """Ask the orchestrator to stop, and take its lock once it has left; None if another one took it first."""
    orchestrator = present_holder(files.lock)
    is_recorded = _ask_orchestrator(files, now=now)
    with suppress(RecordsError):
        signal_holder(files.lock, signal.SIGCONT)  # one suspended by Ctrl-Z would never look
    on_wait(f"asked {orchestrator or 'its orchestrator'} to stop; it waits for its workers")
    while (lock := hold(files.lock)) is None:
        present = present_holder(files.lock)
        orchestrator = orchestrator or present
        if present is not None and orchestrator is not None and not present.is_same_process(orchestrator):
            return None
        time.sleep(PAUSE_S)
        is_forgotten = is_recorded and not files.stop_request.exists()  # it was starting, and removed it
        if is_forgotten or (now and not is_recorded):  # a second signal kills its workers
            with suppress(RecordsError):
                is_recorded = _ask_orchestrator(files, now=now)
    return lock


def _ask_orchestrator(files: CampaignFiles, *, now: bool) -> bool:
    """Ask by a file, or by a signal where it cannot be written; return whether it was."""
    try:
        ask_to_stop(files, now=now)
    except RecordsError:
        if not signal_holder(files.lock, signal.SIGTERM):
            raise
        return False
    return True


def _stop_workers(
    files: CampaignFiles, lock: HeldLock, *, now: bool, trusted: str, on_wait: Callable[[str], None]
) -> tuple[str, ...]:
    """Stop every worker that is alive or queued, and record how its run ended; return their runs."""
    runs, (origin, _) = files_of_runs(files), known_origin(files)
    if origin.launcher not in (trusted, *names("launchers")):
        raise LaunchError(
            f"{files.origin}: names the launcher {plain(origin.launcher)!r}, code that is not imported just "
            f"because a directory says so. If it is yours: retrain stop {as_typed(files.directory)} "
            f"--launcher {shlex.quote(plain(origin.launcher))}"
        )
    launcher = open_launcher(origin.launcher, assignment_for_stopping(files, runs, origin, on_wait))
    if launcher.queues:  # another machine may resume it
        lock.renew()
    queued = launcher.queued()
    alive = {  # one unreadable run does not keep the others running
        run_id: run
        for run_id, run in runs.items()
        if run_id in queued or readable(is_held, run.lock, on_wait)
    }
    before = {run_id: readable(ended_attempts, run, on_wait) for run_id, run in alive.items()}
    for line in _whom_it_stops(alive, origin.launcher):
        on_wait(line)
    launcher.adopt(list(alive))
    launcher.cancel(list(alive), now=now)
    left = set(alive)
    while left:
        left -= {event.run_id for event in launcher.poll(PAUSE_S) if isinstance(event, Ended)}

    def concluded(run: RunFiles, before: int) -> Ending:
        return conclude(run, recorded_hash(run), None, RunState.INTERRUPTED, before)

    for run_id, run in alive.items():
        readable(partial(concluded, before=before[run_id] or 0), run, on_wait)
    with suppress(RecordsError):  # it only repeats the runs' records; the next resume rewrites it
        if alive and (manifest := read_manifest(files.manifest)) is not None:
            ended = replace(refresh(manifest, files, ended=True), exit_code=EXIT_INTERRUPTED)
            write_manifest(files.manifest, ended)
    return tuple(alive)


def _whom_it_stops(alive: Mapping[str, RunFiles], launcher: str) -> Iterator[str]:
    for run_id, run in islice(alive.items(), SHOWN_RUNS):
        where = f"queued by {launcher}"
        if readable(is_held, run.lock):
            worker = holder(run.lock)
            far = ": signals do not reach that machine, so stop it there; waiting for it to end"
            where = f"{worker or 'an unknown process'}{'' if worker is None or worker.is_here else far}"
        yield f"no orchestrator is alive; stopping {run_id}, {where}"
    if len(alive) > SHOWN_RUNS:
        yield f"and {len(alive) - SHOWN_RUNS} more: {len(alive)} runs in all"
