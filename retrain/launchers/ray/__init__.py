"""A campaign on a Ray cluster: one job, the driver, keeps up to `max_workers` tasks submitted.

    launcher.py   runs in the orchestrator: submits the driver and reads its events
    driver.py     runs on the head: submits runs to Ray as tasks, and resubmits lost ones
    task.py       runs on a node: a worker process, which ends with the task
    home.py       the directory `ray/` of a campaign, through which these three communicate
    client.py     Ray's Jobs API     script.py   what is submitted

The campaign continues without the orchestrator, because everything else runs in the cluster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from retrain.config.campaign import Ray
from retrain.config.keys import LARGEST_COUNT
from retrain.config.resolve import build
from retrain.errors import LaunchError
from retrain.extras import load, missing_problem
from retrain.launchers import Assignment
from retrain.launchers.ray.client import LOCAL, Client
from retrain.launchers.ray.launcher import RayLauncher
from retrain.launchers.ray.script import large_enough, shown, wanted_of
from retrain.launchers.shared_permits import table_problems, workers_at_a_time
from retrain.records.text import plain

OWN_KEYS = {"CPU": "cpus", "GPU": "gpus", "memory": "memory_gb"}
EXTRA = "ray"
PACKAGES = ("ray", "aiohttp")


def open_launcher(assignment: Assignment) -> RayLauncher:
    """Return a launcher; raises LaunchError as `check_engine` does, before any request."""
    return RayLauncher(assignment, _usable(assignment))


def at_a_time(assignment: Assignment) -> int:
    """Return the cap."""
    return workers_at_a_time(assignment, _table(assignment).permits)


def script(assignment: Assignment) -> str:
    """Return what would be submitted."""
    return shown(assignment, _table(assignment))


def check_engine(assignment: Assignment) -> None:
    """Raise LaunchError unless the cluster answers, and has a node that is large enough for a run."""
    table = _usable(assignment)
    if table.address == LOCAL:
        return
    client = Client(table.address)
    client.require_version(as_here=not table.python)
    if not table.autoscales:
        _require_room(table, client.resources())


def _table(assignment: Assignment) -> Ray:
    # share_seconds: in the origin.json of campaigns that 0.1.0 started
    return build(Ray, {key: value for key, value in assignment.options.items() if key != "share_seconds"})


def _usable(assignment: Assignment) -> Ray:
    """Return the table of a campaign, if Ray is installed and accepts the runtime environment."""
    if problem := missing_problem("launchers", "ray"):
        raise LaunchError(problem)
    table = _table(assignment)
    try:
        load("ray.runtime_env", "ray", "ray").RuntimeEnv(**table.runtime_env)
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        raise LaunchError(f"[campaign.ray].runtime_env: Ray refuses it: {plain(str(error), 300)}") from error
    return table


def _require_room(table: Ray, nodes: Sequence[Mapping[str, float]]) -> None:
    """Raise unless a node, by its total resources, is large enough for a run."""
    if large_enough(table, nodes):
        return
    wanted = wanted_of(table)
    most = {name: max((node.get(name, 0.0) for node in nodes), default=0.0) for name in wanted}
    lacking = [
        f"{name} = {need:g} (the most is {most[name]:g})"
        for name, need in wanted.items()
        if need > most[name]
    ]
    raise LaunchError(
        f"no node of the Ray cluster has {', '.join(lacking) or 'all that a run asks for at once'}, so no "
        "run would ever start; see [campaign.ray], and autoscales there if the cluster adds nodes by itself"
    )


def check_campaign(assignment: Assignment) -> list[str]:
    """List problems that hold on every cluster."""
    table = _table(assignment)
    where = "[campaign.ray]"
    problems = table_problems(assignment, table, "campaign.ray")
    for name, need in table.resources.items():
        if isinstance(need, bool) or not isinstance(need, int | float) or not 0 < need <= LARGEST_COUNT:
            problems.append(f"{where}.resources.{name}: got {need!r}; needs a number above 0")
        if name in OWN_KEYS:
            problems.append(f"{where}.resources.{name}: is no custom resource; use the key {OWN_KEYS[name]}")
    if not (table.cpus or table.gpus or table.memory_gb or table.resources):
        problems.append(
            f"{where}.cpus: got 0; ask for something, because Ray does not limit tasks that ask for nothing"
        )
    return [*problems, *_environment_problems(table)]


def _environment_problems(table: Ray) -> Iterator[str]:
    where = "[campaign.ray].runtime_env"
    for key in ("working_dir", "py_modules"):
        value = table.runtime_env.get(key, [])
        for given in value if isinstance(value, list) else [value]:
            if "://" not in str(given):
                yield (
                    f"{where}.{key}: {given!r} would be copied; workers run in the directory that the "
                    "campaign is started from, so leave it out, or give a URI"
                )
    variables = table.runtime_env.get("env_vars", {})
    if not isinstance(variables, dict) or not all(isinstance(text, str) for text in variables.values()):
        yield f"{where}.env_vars: needs a table of strings"
