"""A campaign's launcher: what it is given, asked and opened for; its permits; leaving it for another.

A campaign leaves a launcher only once the cluster has none of its runs: they would start beside those of the
new launcher, and `max_workers` would not hold.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.backends import Devices
from retrain.base import registry
from retrain.base.errors import ConfigError, LaunchError
from retrain.campaign.launchers import Assignment, Launcher
from retrain.config.keys import Tables, quote
from retrain.config.resolve import options_of, unused_keys
from retrain.config.schema import FIRST_PERMITS, CampaignSection, Config
from retrain.plan.build import plan_runs
from retrain.plan.matrix import Plan
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.text import as_typed, count_of, first_of

if TYPE_CHECKING:
    from retrain.plan.preflight import Checked
    from retrain.records.provenance import Provenance

NOT_YET = "<id>"  # shown in a script before the campaign has a directory


def assignment_of(
    plan: Plan, files: CampaignFiles, where: Path, say: Callable[[str], None] = lambda text: None
) -> Assignment:
    """Return a plan's assignment, for its launcher; `where` is the workers' working directory."""
    directory = files.directory.absolute()
    absolute = replace(files, directory=directory)
    return Assignment(
        campaign=directory.name,
        directory=directory,
        runs={run.run_id: absolute.run(run.run_id).directory for run in plan.runs},
        workers=plan.workers,
        permits=plan.permits,
        permits_adapt=plan.permits_adapt,
        permit_directories=tuple(
            {Path(b.throttle_dir) for b in plan.backends_with_permits if b.throttle_dir}
        ),
        where=where,
        gpu_runs={run.run_id: run.wants_gpu for run in plan.runs if run.wants_gpu},
        devices=Devices.most(run.devices for run in plan.runs),
        options=options_of(plan.campaign),
        say=say,
    )


def assignment_for_stopping(
    files: CampaignFiles, runs: Mapping[str, RunFiles], origin: Provenance, say: Callable[[str], None]
) -> Assignment:
    """Return what a launcher needs to find and end its runs, without campaign.toml, which may be damaged.

    No worker may start meanwhile, so the maximum at a time is 0.
    """
    directories = {run_id: run.directory.absolute() for run_id, run in runs.items()}
    directory, options = files.directory.absolute(), dict(origin.options)
    return Assignment(directory.name, directory, directories, 0, None, Path.cwd(), options=options, say=say)


def open_launcher(name: str, assignment: Assignment) -> Launcher:
    """Open a launcher by its TOML name; raises LaunchError if it cannot work here."""
    opened = registry.bound("launchers", name, assignment.options)(assignment)
    launcher: Launcher = registry.check_made("launchers", name, opened)
    return launcher


def uses_cluster(campaign: CampaignSection) -> bool:
    """Whether its launcher submits runs to a cluster, whose workers may be on other machines."""
    return registry.hook("launchers", campaign.launcher, "script") is not None


def as_launched(plan: Plan, source: str) -> Plan:
    """Return a plan with the number of workers that its launcher runs at a time: permits may allow fewer.

    Raises ConfigError with every problem that the launcher finds in it, before anything is created.
    """
    launcher, assignment = plan.campaign.launcher, _assignment_before_start(plan)
    if problems := registry.ask("launchers", launcher, "check_campaign", assignment):
        raise ConfigError([f"{source} {problem}" for problem in problems])
    workers: int | None = None
    if plan.campaign.parallel:
        in_turn = "parallel" in unused_keys(plan.campaign)
        workers = 1 if in_turn else registry.ask("launchers", launcher, "at_a_time", assignment)
    return plan if workers is None else replace(plan, campaign=replace(plan.campaign, max_workers=workers))


def checked_plan(config: Config, source: str) -> tuple[Plan, Checked]:
    """Plan a file as its launcher runs it, and check its runs; a ConfigError says what is wrong."""
    from retrain.campaign.admission import check_fits  # not at the top: `stop` needs neither
    from retrain.plan.preflight import preflight

    plan = as_launched(plan_runs(config, source), source)
    if (command := plan.campaign.notify) and shutil.which(command[0]) is None:
        problem = f"got {quote(command)}; {quote(command[0])} is no program that is found from here"
        raise ConfigError(f"{source} [campaign].notify: {problem}")
    if plan.mirror:
        from retrain.campaign.mirror import place_of  # here: few files have one

        place_of(plan.mirror, source)
    checked = preflight(plan, source)
    check_fits(checked.memory.values(), source)
    return plan, checked


def ask_launcher(plan: Plan, hook: str) -> Any:
    """Return what a launcher's hook says of a plan that has no directory yet."""
    return registry.ask("launchers", plan.campaign.launcher, hook, _assignment_before_start(plan))


def _assignment_before_start(plan: Plan) -> Assignment:
    """Return the assignment of a plan that has no directory yet."""
    files = CampaignFiles(plan.log_dir / f"{plan.name}-{NOT_YET}", plan.is_single_run)
    return assignment_of(plan, files, Path.cwd())


def require_left(
    files: CampaignFiles,
    origin: Provenance,
    campaign: CampaignSection,
    run_ids: Iterable[str],
    say: Callable[[str], None],
) -> None:
    """Raise if a campaign changes its launcher while the former cluster still has runs of it.

    `files` are the campaign's, whose lock is ours, `origin` says how it was launched before, and `campaign`
    how it continues. Raises LaunchError also if the cluster does not answer.
    """
    home = files.directory / origin.launcher  # where launchers that queue keep what they submitted
    cluster = _cluster_of(campaign.launcher, options_of(campaign))
    if _cluster_of(origin.launcher, origin.options) == cluster or not home.is_dir():
        return
    runs = {run_id: files.run(run_id) for run_id in run_ids}
    try:
        launcher = open_launcher(origin.launcher, assignment_for_stopping(files, runs, origin, say))
        queued = [run_id for run_id in launcher.queued() if not runs[run_id].done.exists()]
    except LaunchError as error:
        raise LaunchError(
            f"{files.directory}: ran with {origin.launcher}, which cannot be asked whether it still has runs "
            f"of it: {error}. Resume where it answers; if it is gone for good, remove {home}"
        ) from error
    if queued:
        raise LaunchError(
            f"{files.directory}: {origin.launcher} still has {count_of(len(queued), 'run')} of it: "
            f"{first_of(sorted(queued))}. Cancel them with "
            f'`retrain stop {as_typed(files.directory)}`, or continue with launcher = "{origin.launcher}"'
        )


def _cluster_of(launcher: str, options: Tables) -> tuple[str, object]:
    return launcher, options.get("address", "")


def open_permits(plan: Plan, files: CampaignFiles, say: Callable[[str], None]) -> None:
    """Set each directory's number of permits to the plan's; report what differs."""
    from retrain.control.semaphore import (  # not at the top: `explain` opens none
        FileSemaphore,
        lock_sharing_problem,
    )
    from retrain.control.semaphore.adaptive import remove_leftover_states

    for directory, permits, is_shared in permit_directories(plan, files):
        problem = lock_sharing_problem(directory)
        if problem:
            say(f"{problem} Permits will hold on this machine only.")
        semaphore = FileSemaphore(directory, permits or FIRST_PERMITS, allow_unshared=True)
        if permits is None:
            remove_leftover_states(directory)  # a number learned by an earlier attempt is kept
            continue
        if semaphore.permits == permits:
            continue
        if is_shared:
            say(f"{directory} is shared and has {semaphore.permits} permits instead of {permits}")
        else:
            semaphore.set_permits(permits)


def permit_directories(plan: Plan, files: CampaignFiles) -> list[tuple[Path, int | None, bool]]:
    """Return the directories of permits: how many each has (None: adaptive), and whether it is shared."""
    by_directory: dict[Path, tuple[int | None, bool]] = {}
    for run in plan.first_runs.values():
        backend = run.config.backend
        directory = Path(backend.throttle_dir) if backend.throttle_dir else files.permits
        permits = None if backend.adapts_permits else backend.first_permits
        by_directory[directory] = (permits, bool(backend.throttle_dir))
    return [(directory, permits, is_shared) for directory, (permits, is_shared) in by_directory.items()]
