"""What a launcher is told of a campaign, from a plan or, for stopping, from the campaign's records alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import Any

from retrain import registry
from retrain.config.schema import Campaign, Config
from retrain.errors import ConfigError
from retrain.launchers import Assignment, Launcher
from retrain.plan.matrix import Plan
from retrain.plan.provenance import Provenance
from retrain.records.layout import CampaignFiles, RunFiles

NOT_YET = "<id>"  # stands in a script that is shown before the campaign has a directory


def options_of(campaign: Campaign) -> dict[str, Any]:
    """Return the table `[campaign.<launcher>]`; empty for a launcher that has none."""
    table = getattr(campaign, campaign.launcher, None)
    return (
        asdict(table)
        if is_dataclass(table) and not isinstance(table, type)
        else dict(campaign.launcher_options)
    )


def assignment_of(
    plan: Plan, files: CampaignFiles, where: Path, say: Callable[[str], None] = lambda text: None
) -> Assignment:
    """Return what the launcher of a plan is opened for.

    Args:
        plan: what is to run.
        files: the campaign's.
        where: the workers' working directory.
        say: tells whoever watches.
    """
    directory = files.directory.absolute()
    absolute = CampaignFiles(directory)
    directories = {run.run_id: absolute.run(run.run_id).directory for run in plan.runs}
    backends = [run.config.backend for run in plan.runs if takes_permits(run.config)]
    return Assignment(
        campaign=directory.name,
        directory=directory,
        runs={plan.runs[0].run_id: directory} if plan.is_single_run else directories,
        workers=plan.workers,
        permits=min((backend.first_permits for backend in backends), default=None),
        permits_adapt=any(backend.adapts_permits for backend in backends),
        permit_directories=tuple({Path(b.throttle_dir) for b in backends if b.throttle_dir}),
        where=where,
        gpu_runs=frozenset(run.run_id for run in plan.runs if _wants_gpu(run.config)),
        options=options_of(plan.campaign),
        say=say,
    )


def assignment_for_stopping(
    files: CampaignFiles, runs: Mapping[str, RunFiles], origin: Provenance, say: Callable[[str], None]
) -> Assignment:
    """Return what a launcher must know to find and end what it runs; campaign.toml may be damaged by now."""
    directories = {run_id: found.directory.absolute() for run_id, found in runs.items()}
    directory = files.directory.absolute()
    options, workers = dict(origin.options), len(runs)
    return Assignment(
        directory.name, directory, directories, workers, None, where=Path.cwd(), options=options, say=say
    )


def takes_permits(config: Config) -> bool:
    """Whether a run's backend calls an API under permits; one that does not say is taken to."""
    says = registry.hook("backends", config.backend.backend, "takes_permits")
    return bool(says(config.backend.options)) if says else True


def _wants_gpu(config: Config) -> bool:
    says = registry.hook("backends", config.backend.backend, "wants_gpu")
    return bool(says(config.backend.options)) if says else False


def open_launcher(name: str, assignment: Assignment) -> Launcher:
    """Open a launcher by its TOML name.

    Raises:
        LaunchError: it cannot work here.
    """
    opened = registry.bound("launchers", name, assignment.options)(assignment)
    launcher: Launcher = registry.check_made("launchers", name, opened)
    return launcher


def has_engine(campaign: Campaign) -> bool:
    """Whether its launcher submits runs to an engine, whose workers may be on other machines."""
    return registry.hook("launchers", campaign.launcher, "script") is not None


def check_launch(plan: Plan, source: str) -> None:
    """Ask the launcher what of a plan cannot work, before anything exists.

    Raises:
        ConfigError: every problem found.
    """
    check = registry.hook("launchers", plan.campaign.launcher, "check_campaign")
    problems = check(_draft(plan)) if check else []
    if problems:
        raise ConfigError([f"{source} {problem}" for problem in problems])


def check_engine(plan: Plan) -> None:
    """Ask the launcher's engine whether it would take a plan.

    Raises:
        LaunchError: it is not there, or would not.
    """
    check = registry.hook("launchers", plan.campaign.launcher, "check_engine")
    if check:
        check(_draft(plan))


def as_launched(plan: Plan) -> Plan:
    """Return a plan with as many workers at a time as its launcher will have: permits may allow fewer."""
    says = registry.hook("launchers", plan.campaign.launcher, "at_a_time")
    if says is None or not plan.campaign.parallel:
        return plan
    return replace(plan, campaign=replace(plan.campaign, max_workers=says(_draft(plan))))


def launch_script(plan: Plan) -> str:
    """Return what the launcher would submit; empty for one that submits nothing."""
    script = registry.hook("launchers", plan.campaign.launcher, "script")
    return str(script(_draft(plan))) if script else ""


def _draft(plan: Plan) -> Assignment:
    files = CampaignFiles(plan.log_dir / f"{plan.name}-{NOT_YET}")
    return assignment_of(plan, files, Path.cwd())
