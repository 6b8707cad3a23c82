"""Starts or resumes a campaign, here or in the background: all that is checked and written before it runs.

A campaign is planned anew from its own file as it continues or grows.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from retrain.base.errors import EXIT_DONE, EXIT_LAUNCH, ConfigError, LaunchError, RecordsError, records_error
from retrain.base.locks import holder, is_held
from retrain.base.threads import use_one_thread
from retrain.campaign import Observer
from retrain.campaign.admission import check_memory
from retrain.campaign.launcher_setup import as_launched, ask_launcher, checked_plan, uses_cluster
from retrain.campaign.mirror import require_ours, reserved
from retrain.campaign.orchestrate import Campaign, CampaignOutcome, Resumption, supervised
from retrain.campaign.reconcile import plan_anew, reconcile, write_runs
from retrain.config.load import load_config
from retrain.config.prices import missing_price
from retrain.config.resolve import options_of
from retrain.config.toml_files import complete_content, naming_bases, read_file
from retrain.plan.notes import notes_of
from retrain.plan.preflight import check_servers
from retrain.records.files import make_new_directory, open_log, write_atomic
from retrain.records.layout import CampaignFiles, create_directory, is_single_run, open_campaign
from retrain.records.manifest import known_manifest
from retrain.records.mirror import write_state
from retrain.records.provenance import Provenance, digest, known_origin, write_provenance

PAUSE_S = 0.02


def start(
    config_path: Path,
    overrides: Sequence[str] = (),
    observer: Observer | None = None,
    beside: Path | None = None,
) -> Campaign:
    """Check a file, and create its campaign's directory and every run's run.toml.

    Dotted paths are looked for in the directory `beside`, by default the file's, before the current one.

    Raises:
        ConfigError: every problem of the file; nothing was created.
        LaunchError: a server that runs need, or the launcher's cluster, does not answer; nothing was created.
        RecordsError: the directory cannot be written.
    """
    use_one_thread()
    beside = beside or config_path.parent
    content = complete_content(config_path)  # first: it may be edited during the checks, which take minutes
    with naming_bases(config_path):
        config = load_config(config_path, overrides, beside=beside)
        plan, checked = checked_plan(config, config_path.name)
        if not uses_cluster(plan.campaign):
            check_memory(plan, config_path.name)
            check_servers({run.condition: run.config for run in plan.runs}.values(), config_path.name)
        ask_launcher(plan, "check_cluster")
    observer = observer or Observer()
    mirror = reserved(plan.mirror, config_path.name, observer.notice) if plan.mirror else None
    files = CampaignFiles(create_directory(plan.log_dir, plan.name), plan.is_single_run)
    where = str(Path.cwd())
    origin = Provenance(
        plan.name,
        tuple(overrides),
        where,
        seed=plan.runs[0].seed if len(plan.seeds) == 1 or plan.decision else None,
        launcher=plan.campaign.launcher,
        digest=digest(content),
        options=options_of(plan.campaign),
        way_back=os.path.relpath(where, files.directory.absolute()),
        beside=os.path.relpath(beside),
    )
    try:
        write_provenance(files, origin)  # without which, and the file as given, no `resume` is possible
        write_atomic(files.campaign_toml, content)
        if not plan.is_single_run:
            make_new_directory(files.runs)
        write_runs(plan, files, origin, observer.notice)
        if mirror is not None:
            write_state(files, mirror)
        for note in notes_of(plan, checked):
            observer.notice(note)
    except BaseException as error:  # also Ctrl-C; nothing ran in it yet
        shutil.rmtree(files.directory, ignore_errors=True)
        if isinstance(error, RecordsError) and isinstance(cause := error.__cause__, OSError):
            raise records_error(files.directory, "write", cause, then="start again") from cause
        raise
    return Campaign(plan, files, origin, observer)


def reopen(
    directory: Path,
    observer: Observer | None = None,
    *,
    accept_config_change: bool = False,
    just_started: bool = False,
    more_seeds: int = 0,
    budget_usd: float | None = None,
) -> Campaign:
    """Open an existing campaign, or a copy of it, to resume it.

    Args:
        directory: the campaign's.
        observer: receives the campaign's events.
        accept_config_change: continue although campaign.toml now gives other results: each unfinished
            run from its newest checkpoint, with the present configuration.
        just_started: it has not run yet, so an existing request to stop it stands.
        more_seeds: how many seeds each condition gets besides those that it has.
        budget_usd: what the campaign may cost in all, with what it has cost so far; None: as it was.

    Raises:
        RecordsError: its records cannot be read or written.
        ConfigError: it is no campaign, or its campaign.toml is invalid, or changed without consent.
    """
    use_one_thread()
    is_named = directory.name.strip(".")  # unlike `.` and `..`; messages show the path as it was given
    files = open_campaign(directory if is_named else directory.resolve())
    origin, lost = known_origin(files, is_replaced=True)
    if more_seeds and is_single_run(directory):
        raise ConfigError(f"{directory}: is a single run; seeds are added to a campaign")
    extended = replace(
        origin,
        added_seeds=origin.added_seeds + more_seeds,
        overrides=with_budget(origin.overrides, budget_usd),
    )
    content = read_file(files.campaign_toml)  # first, as in `start`: the next resume tells of an edit since
    plan, where = plan_anew(files, extended)
    source = str(files.campaign_toml)
    problems = {missing_price(run.config): None for run in plan.first_runs.values()}
    if unpriced := [f"{source} {problem}" for problem in problems if problem]:
        raise ConfigError(unpriced)
    plan = as_launched(plan, source)
    if not uses_cluster(plan.campaign):
        check_memory(plan, source)  # this machine may have less than the last
    files = replace(files, is_single=plan.is_single_run)
    observer = observer or Observer()
    if plan.mirror:
        require_ours(files, plan.mirror, source, observer.notice)
    manifest = known_manifest(files.manifest)
    reconciled = reconcile(plan, files, origin, manifest.manifest, accept_changes=accept_config_change)
    continued = replace(
        extended,
        where=str(where),
        way_back=os.path.relpath(where, files.directory),
        digest=digest(content),
        launcher=plan.campaign.launcher,
        options=options_of(plan.campaign),
    )

    resumption = Resumption(
        reconciled.changes,
        reconciled.renamed,
        writes_origin=bool(lost) or continued != origin,
        lost=lost,
        keeps_request=just_started,
    )
    return Campaign(reconciled.plan, files, continued, observer, known=manifest, resumption=resumption)


def with_budget(overrides: Sequence[str], usd: float | None) -> tuple[str, ...]:
    """Return overrides with this budget instead of theirs; as they are for None."""
    key = "budget.usd="
    if usd is None:
        return tuple(overrides)
    others = (override for override in overrides if not override.replace(" ", "").startswith(key))
    return (*others, f"{key}{usd}")


def run_campaign(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), observer: Observer | None = None
) -> CampaignOutcome:
    """Run a campaign file to its end, as `retrain run` does; `overrides` are `section.key=value` each.

    Raises:
        ConfigError: every problem of the file; nothing was created.
        LaunchError: nothing could be started.
    """
    return start(Path(path), overrides, observer).execute()


def detach(directory: Path, arguments: Sequence[str] = ()) -> int:
    """Start `retrain resume DIRECTORY` in the background, with more arguments of `resume`.

    Returns:
        Its process id, once it holds the campaign (or has already finished it).

    Raises:
        LaunchError: it ended at once, and campaign.log says why; or another one holds the campaign.
    """
    files = CampaignFiles(directory)
    log = open_log(files.log)
    start = os.fstat(log).st_size
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "retrain", "resume", str(directory), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(f"{directory}: cannot start an orchestrator ({error.strerror})") from error
    finally:
        os.close(log)
    while (code := process.poll()) is None:
        orchestrator = holder(files.lock)
        if orchestrator is not None and orchestrator.pid == process.pid:
            return process.pid
        time.sleep(PAUSE_S)
    if code == EXIT_LAUNCH and is_held(files.lock):  # by another one, which writes to the same log
        raise supervised(files)
    if code != EXIT_DONE:
        output = files.log.read_bytes()[start:].decode(errors="replace").strip()
        raise LaunchError(f"{directory}: the orchestrator ended at once: {output or f'exit code {code}'}")
    return process.pid
