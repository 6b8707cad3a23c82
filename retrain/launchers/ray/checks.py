"""Checks a table `[campaign.ray]`: by itself, and against a given cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from retrain.config.engines import Ray
from retrain.config.keys import LARGEST_COUNT
from retrain.config.resolve import build
from retrain.errors import LaunchError
from retrain.extras import load, missing_problem
from retrain.launchers import Assignment
from retrain.launchers.permit_split import sharing_problems
from retrain.launchers.ray.client import Client
from retrain.records.text import plain

OWN_KEYS = {"CPU": "cpus", "GPU": "gpus", "memory": "memory_gb"}


def check_engine(assignment: Assignment) -> None:
    """Check that the cluster answers, and has a node that is large enough for a run.

    Raises:
        LaunchError: it does not, or has none.
    """
    require_packages()
    table = build(Ray, assignment.options)
    check_environment(table.runtime_env)
    if table.address == "local":
        return
    client = Client(table.address)
    client.require_version(as_here=not table.python)
    if not table.autoscales:
        require_room(table, client.resources())


def require_packages() -> None:
    """Check that the extra is installed.

    Raises:
        LaunchError: it is not.
    """
    problem = missing_problem("launchers", "ray")
    if problem is not None:
        raise LaunchError(problem)


def check_environment(environment: Mapping[str, Any]) -> None:
    """Have Ray judge a runtime environment.

    Raises:
        LaunchError: it refuses it.
    """
    library = load("ray.runtime_env", "ray", "ray")
    try:
        library.RuntimeEnv(**environment)
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        raise LaunchError(f"[campaign.ray].runtime_env: Ray refuses it: {plain(str(error), 300)}") from error


def require_room(table: Ray, nodes: Sequence[Mapping[str, float]]) -> None:
    """Check that a node is large enough for a run.

    Args:
        table: what each run requests.
        nodes: total resources of each node.

    Raises:
        LaunchError: none is.
    """
    if large_enough(table, nodes):
        return
    wanted = _wanted(table)
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


def large_enough(table: Ray, nodes: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """Return the nodes on which a run can be placed, as `require_room` takes them."""
    wanted = _wanted(table).items()
    return [node for node in nodes if all(node.get(name, 0.0) >= need for name, need in wanted)]


def _wanted(table: Ray) -> dict[str, float]:
    return {"CPU": table.cpus, "GPU": table.gpus, "memory": table.memory_gb * 1e9, **table.resources}


def check_campaign(assignment: Assignment) -> list[str]:
    """List problems that hold on every cluster."""
    table = build(Ray, assignment.options)
    where = "[campaign.ray]"
    problems = [
        f"{where}.setup: {line!r} has more than one line; give each line its own string"
        for line in table.setup
        if "\n" in line
    ]
    for name, need in table.resources.items():
        if isinstance(need, bool) or not isinstance(need, int | float) or not 0 < need <= LARGEST_COUNT:
            problems.append(f"{where}.resources.{name}: got {need!r}; needs a number above 0")
        if name in OWN_KEYS:
            problems.append(f"{where}.resources.{name}: is no custom resource; use the key {OWN_KEYS[name]}")
    if not (table.cpus or table.gpus or table.memory_gb or table.resources):
        problems.append(
            f"{where}.cpus: got 0; ask for something, because Ray does not limit tasks that ask for nothing"
        )
    problems += _environment_problems(table)
    problems += sharing_problems(assignment, table.permits, "campaign.ray")
    return problems


def _environment_problems(table: Ray) -> list[str]:
    where = "[campaign.ray]"
    problems = []
    for key in ("working_dir", "py_modules"):
        for given in _as_list(table.runtime_env.get(key)):
            if "://" not in str(given):
                problems.append(
                    f"{where}.runtime_env.{key}: {given!r} would be copied; workers run in the directory "
                    "that the campaign is started from, so leave it out, or give a URI"
                )
    variables = table.runtime_env.get("env_vars", {})
    if not isinstance(variables, dict) or not all(isinstance(text, str) for text in variables.values()):
        problems.append(f"{where}.runtime_env.env_vars: needs a table of strings")
    return problems


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [] if value is None else [value]
