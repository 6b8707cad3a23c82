"""A campaign on a Ray cluster: one job, the driver, keeps up to `max_workers` tasks submitted.

    launcher.py   runs in the orchestrator: submits the driver and reads its events
    driver.py     runs on the head: submits runs to Ray as tasks, and resubmits lost ones
    task.py       runs on a node: a worker process, which ends with the task
    home.py       the directory `ray/` of a campaign, through which these three communicate
    client.py     Ray's Jobs API     checks.py  what cannot work     script.py  what is submitted
    locks.py      two nodes test file locks     local.py  a Ray of this machine alone

The campaign continues without the orchestrator, because everything else runs in the cluster.
"""

from __future__ import annotations

from retrain.config.engines import Ray
from retrain.config.resolve import build
from retrain.launchers import Assignment
from retrain.launchers.permit_split import workers_at_a_time
from retrain.launchers.ray.checks import check_campaign, check_engine, check_environment, require_packages
from retrain.launchers.ray.launcher import RayLauncher
from retrain.launchers.ray.script import shown

__all__ = ["at_a_time", "check_campaign", "check_engine", "open_launcher", "script"]

EXTRA = "ray"
PACKAGES = ("ray", "aiohttp")


def open_launcher(assignment: Assignment) -> RayLauncher:
    """Return a launcher.

    Raises:
        LaunchError: the extra is not installed, or refuses the runtime environment.
    """
    require_packages()
    table = build(Ray, assignment.options)
    check_environment(table.runtime_env)
    return RayLauncher(assignment, table)


def at_a_time(assignment: Assignment) -> int:
    """Return the cap."""
    return workers_at_a_time(assignment, build(Ray, assignment.options).permits)


def script(assignment: Assignment) -> str:
    """Return what would be submitted."""
    return shown(assignment, build(Ray, assignment.options))
