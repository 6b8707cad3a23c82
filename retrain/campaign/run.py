"""Starts or resumes a campaign, here or in the background: all that is checked and written before it runs.

A campaign is planned anew from its own file as it continues or grows.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from retrain.base.errors import EXIT_DONE, EXIT_LAUNCH, ConfigError, LaunchError, RecordsError, records_error
from retrain.base.locks.held import holder, is_held
from retrain.base.threads import use_one_thread
from retrain.campaign import Observer
from retrain.campaign.admission import check_memory
from retrain.campaign.launcher_setup import as_launched, ask_launcher, checked_plan, uses_cluster
from retrain.campaign.orchestrate import CampaignOutcome, CampaignRun, supervised
from retrain.campaign.reconcile import reconcile, write_what_differs
from retrain.config.launching import options_of
from retrain.config.load import load_config, read_file
from retrain.config.prices import missing_price
from retrain.plan.build import plan_runs
from retrain.plan.checklist import notes_of
from retrain.plan.matrix import Plan
from retrain.plan.preflight import check_servers
from retrain.records.files import make_new_directory, open_log, remove_file, write_atomic
from retrain.records.layout import CampaignFiles, create_directory, is_single_run, open_campaign
from retrain.records.lines import append_line
from retrain.records.provenance import (
    Provenance,
    digest,
    known_origin,
    working_directories,
    write_provenance,
)
from retrain.records.run_state import rename_done
from retrain.records.rungs import all_of, read_proposals

PAUSE_S = 0.02


def start(
    config_path: Path,
    overrides: Sequence[str] = (),
    observer: Observer | None = None,
    beside: Path | None = None,
) -> CampaignRun:
    """Check a file, and create its campaign's directory and every run's run.toml.

    Dotted paths are looked for in the directory `beside`, by default the file's, before the current one.

    Raises:
        ConfigError: every problem of the file; nothing was created.
        LaunchError: a server that runs need, or the launcher's cluster, does not answer; nothing was created.
        RecordsError: the directory cannot be written.
    """
    use_one_thread()
    beside = beside or config_path.parent
    content = read_file(config_path)  # first: it may be edited during the checks, which can take minutes
    config = load_config(config_path, overrides, beside=beside)
    plan, checked = checked_plan(config, config_path.name)
    if not uses_cluster(plan.campaign):
        check_memory(plan, config_path.name)
        check_servers({run.condition: run.config for run in plan.runs}.values(), config_path.name)
    ask_launcher(plan, "check_cluster")
    files = CampaignFiles(create_directory(plan.log_dir, plan.name), plan.is_single_run)
    campaign = CampaignRun(plan, files, observer or Observer())
    with _whole_or_removed(files.directory):
        _write_start(campaign, files, content, overrides, beside)
        for note in notes_of(plan, checked):
            campaign.notice(note)
    return campaign


@contextlib.contextmanager
def _whole_or_removed(directory: Path) -> Iterator[None]:
    """Remove a new campaign's directory unless all of it is written; nothing ran in it yet."""
    try:
        yield
    except BaseException as error:  # also Ctrl-C
        shutil.rmtree(directory, ignore_errors=True)
        if isinstance(error, RecordsError) and isinstance(error.__cause__, OSError):
            raise records_error(directory, "write", error.__cause__, then="start again") from error.__cause__
        raise


def _write_start(
    campaign: CampaignRun, files: CampaignFiles, content: bytes, overrides: Sequence[str], beside: Path
) -> None:
    """Write all that `resume` needs: the file as given, where it came from, and each run's configuration."""
    plan = campaign.plan
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
    write_provenance(files, origin)
    write_atomic(files.campaign_toml, content)
    if not plan.is_single_run:
        make_new_directory(files.runs)
    campaign.propose = partial(_add_proposals, campaign)
    write_what_differs(campaign, origin)


def reopen(
    directory: Path,
    observer: Observer | None = None,
    *,
    accept_config_change: bool = False,
    just_started: bool = False,
    more_seeds: int = 0,
    budget_usd: float | None = None,
) -> CampaignRun:
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
    wanted = _with_more(origin, directory, more_seeds, budget_usd)
    content = read_file(files.campaign_toml)  # first, as in `start`: the next resume tells of an edit since
    plan, where = _checked_anew(files, wanted)
    files = replace(files, is_single=plan.is_single_run)
    found = reconcile(plan, files, origin, accept_changes=accept_config_change)
    campaign = CampaignRun(found.plan, files, observer or Observer())
    campaign.accepted = found.changes
    now = replace(
        wanted,
        where=str(where),
        way_back=os.path.relpath(where, files.directory),
        digest=digest(content),
        launcher=plan.campaign.launcher,
        options=options_of(plan.campaign),
    )

    def catch_up() -> None:
        if not just_started:
            remove_file(files.stop_request)
        for run in found.plan.runs:
            if run.run_id in found.renamed:
                rename_done(files.run(run.run_id).done, found.renamed[run.run_id], run.config_hash)
        write_what_differs(campaign, now)
        if lost:
            campaign.notice(f"{lost}; it is rebuilt from the runs")
        if lost or now != origin:
            write_provenance(files, now)

    campaign.catch_up = catch_up
    campaign.propose = partial(_add_proposals, campaign)
    return campaign


def with_budget(overrides: Sequence[str], usd: float | None) -> tuple[str, ...]:
    """Return overrides with this budget instead of theirs; as they are for None."""
    key = "budget.usd="
    if usd is None:
        return tuple(overrides)
    return (*(one for one in overrides if not one.replace(" ", "").startswith(key)), f"{key}{usd}")


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
        found = holder(files.lock)
        if found is not None and found.pid == process.pid:
            return process.pid
        time.sleep(PAUSE_S)
    if code == EXIT_LAUNCH and is_held(files.lock):  # by another one, which writes to the same log
        raise supervised(files)
    if code != EXIT_DONE:
        said = files.log.read_bytes()[start:].decode(errors="replace").strip()
        raise LaunchError(f"{directory}: the orchestrator ended at once: {said or f'exit code {code}'}")
    return process.pid


def _with_more(origin: Provenance, directory: Path, more_seeds: int, budget_usd: float | None) -> Provenance:
    """Return how a campaign continues with more seeds and another budget."""
    if more_seeds and is_single_run(directory):
        raise ConfigError(f"{directory}: is a single run; seeds are added to a campaign")
    overrides = with_budget(origin.overrides, budget_usd)
    return replace(origin, added_seeds=origin.added_seeds + more_seeds, overrides=overrides)


def _require_prices(plan: Plan, files: CampaignFiles) -> None:
    problems = {missing_price(run.config): None for run in plan.first_runs().values()}
    if lacking := [f"{files.campaign_toml} {problem}" for problem in problems if problem]:
        raise ConfigError(lacking)


def _checked_anew(files: CampaignFiles, origin: Provenance) -> tuple[Plan, Path]:
    """Return the plan of a campaign's file as this machine can run it, and where its paths start."""
    plan, where = _planned_anew(files, origin)
    _require_prices(plan, files)
    plan = as_launched(plan, str(files.campaign_toml))
    if not uses_cluster(plan.campaign):  # this machine may have less memory than the last
        check_memory(plan, str(files.campaign_toml))
    return plan, where


def _planned_anew(files: CampaignFiles, origin: Provenance) -> tuple[Plan, Path]:
    """Return the plan of a campaign's file from the first directory where all its paths exist."""
    problem: ConfigError | None = None
    proposed, file = all_of(read_proposals(files.proposals)), files.campaign_toml.absolute()
    for where in working_directories(files, origin):
        if str(where) not in sys.path:
            sys.path.append(str(where))  # a plugin's dotted path may name a file there
        with contextlib.chdir(where):  # relative paths start there
            try:
                config = load_config(
                    file,
                    origin.overrides,
                    version=origin.version,
                    beside=Path(origin.beside),
                    project=where,
                    proposed=proposed,
                )
                return plan_runs(config, origin.name, origin.seed, origin.added_seeds, len(proposed)), where
            except ConfigError as error:
                problem = problem or error
    raise problem or ConfigError(f"{files.directory}: the directory that its paths are relative to is gone")


def _add_proposals(campaign: CampaignRun, told: Mapping[str, float | None]) -> None:
    """Store what the sampler of a campaign's search proposes next, and enlarge the plan by its runs.

    `told` are the values of conditions from which it goes on.
    """
    from retrain.plan.proposals import propose  # not at the top: few campaigns have a sampler

    files, table = CampaignFiles(campaign.directory.absolute()), campaign.plan.campaign.search
    if table is None:
        return
    found = propose(campaign.plan, table, read_proposals(files.proposals), told, campaign.notice)
    append_line(files.proposals, asdict(found))
    if not found.proposals:
        campaign.notice(
            f"{table.sampler} proposes nothing else, so the search goes on with what it proposed so far"
        )
        return
    origin, _ = known_origin(files)
    plan = as_launched(_planned_anew(files, origin)[0], str(files.campaign_toml))
    campaign.plan = reconcile(plan, files, origin).plan
    write_what_differs(campaign, origin)
