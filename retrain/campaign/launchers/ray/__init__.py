"""A campaign on a Ray cluster: one job, the driver, keeps up to `max_workers` tasks submitted.

    launcher.py   in the orchestrator: submits the driver, writes its orders, reads its events
    driver.py     on the head, with CAMPAIGN NUMBER as arguments: runs are Ray's tasks
    task.py       on a node: a worker process, which ends with its task
    home.py       the files below      client.py   Ray's Jobs API

They communicate through the directory `ray/` of the campaign, wherever they run:

    orders.json    by the orchestrator: the driver in charge, the cap, and what to do and to stop
    events.jsonl   by the driver: what happened to the runs
    stopped/       by the driver: RUN.NUMBER.LIFE.save or .now: a task ends its worker, or does not start it
    job.sh         starts the driver and the workers

- The campaign continues without the orchestrator. The driver reads its orders and the campaign's request to
  stop every second, and exits once no run is left and no orchestrator lives that could submit more.
- Each submission has a number, higher than those before; the driver counts a run's lives under its number. A
  task that Ray lost (with its node, or out of memory) is resubmitted by the orchestrator's retry policy while
  one lives, otherwise by the driver, up to four lives.
- No run runs twice: whether a worker lives is read from its run's lock. Workers that belong to no task of the
  driver count against the cap until they exit; those of an earlier driver are asked to save and exit.
- No run is orphaned: Ray ends the tasks of a driver that is gone, and a worker dies with its task. A stopped
  run that has not begun is cancelled, or its task sees `stopped/`, or its worker the request to stop.
- A driver that is lost is replaced by the orchestrator; without one, by `retrain resume`. One that is not in
  charge starts nothing more and waits for its tasks.
- With `address = "local"` the driver is a process of this machine, with a Ray of its own that ends with it.

This file has the launcher's hooks: what is submitted, and what is wrong with a table before anything is.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from retrain.base.errors import LaunchError
from retrain.base.extras import load, missing_problem
from retrain.campaign.launchers import Assignment
from retrain.campaign.launchers.ray.client import LOCAL, JobsClient
from retrain.campaign.launchers.shared_permits import own_permits, table_problems, workers_at_a_time
from retrain.config.keys import LARGEST_COUNT
from retrain.config.resolve import build
from retrain.config.schema import RaySection
from retrain.records.text import plain

if TYPE_CHECKING:
    from retrain.campaign.launchers.ray.launcher import RayLauncher

OWN_KEYS = {"CPU": "cpus", "GPU": "gpus", "memory": "memory_gb"}
EXTRA = "ray"
PACKAGES = ("ray", "aiohttp")
# Ray ends a stopped job with SIGKILL after 3 s by default, too soon for a checkpoint; this is a day.
GRACE = {"RAY_JOB_STOP_WAIT_TIME_S": "86400"}
NODE = "node:"  # followed by a node's address
DRIVER = "retrain.campaign.launchers.ray.driver"


def open_launcher(assignment: Assignment) -> RayLauncher:
    """Return a launcher; raises LaunchError as `check_cluster` does, before any request."""
    from retrain.campaign.launchers.ray.launcher import RayLauncher  # which imports what is below

    return RayLauncher(assignment, _usable(assignment))


def at_a_time(assignment: Assignment) -> int:
    """Return the cap."""
    return workers_at_a_time(assignment, _table(assignment).permits)


def script(assignment: Assignment) -> str:
    """Return what would be submitted, for `retrain explain`."""
    table = _table(assignment)
    environment = job_options(assignment, table)["runtime_env"]
    environment["env_vars"] = dict.fromkeys(environment["env_vars"], "...")  # may hold secrets
    command = f"bash {assignment.directory}/ray/job.sh"
    lines = [
        "# One job, the driver, on the head of the cluster:",
        f"#   submission_id = {assignment.campaign}.NUMBER",
        f"#   runtime_env = {json.dumps(environment)}",
        f"#   {command} {DRIVER} CAMPAIGN_DIR NUMBER",
        f"# which keeps {workers_at_a_time(assignment, table.permits)} tasks at a time, each asking Ray for",
        *(f"#   {name} = {json.dumps(value)}" for name, value in task_options(table).items()),
        f"# and running `{command} retrain.trainer.worker RUN_DIR`; the script is",
    ]
    return "\n".join(lines) + "\n" + render(assignment, table)


def check_cluster(assignment: Assignment) -> None:
    """Raise LaunchError unless the cluster answers, and has a node that is large enough for a run."""
    table = _usable(assignment)
    if table.address == LOCAL:
        return
    client = JobsClient(table.address)
    client.require_version(as_here=not table.python)
    lacking = what_lacks(task_options(table), client.resources())
    if lacking and not table.autoscales:
        raise LaunchError(
            f"no node of the Ray cluster has {lacking}, so no run would ever start; see [campaign.ray], and "
            "autoscales there if the cluster adds nodes by itself"
        )


def _table(assignment: Assignment) -> RaySection:
    return build(RaySection, assignment.options)


def _usable(assignment: Assignment) -> RaySection:
    """Return the table of a campaign, if Ray is installed and accepts the runtime environment."""
    if problem := missing_problem("launchers", "ray"):
        raise LaunchError(problem)
    table = _table(assignment)
    try:
        load("ray.runtime_env", "ray", "ray").RuntimeEnv(**table.runtime_env)
    except (TypeError, ValueError, RuntimeError, OSError) as error:
        raise LaunchError(f"[campaign.ray].runtime_env: Ray refuses it: {plain(str(error), 300)}") from error
    return table


def check_campaign(assignment: Assignment) -> list[str]:
    """List problems that hold on every cluster."""
    table = _table(assignment)
    where = "[campaign.ray]"
    problems = table_problems(assignment, table, "campaign.ray")
    for name, need in table.resources.items():
        if isinstance(need, bool) or not isinstance(need, int | float) or not 0 < need <= LARGEST_COUNT:
            problems.append(f"{where}.resources.{name}: got {need!r}; needs a number above 0")
        if name in OWN_KEYS:
            key = OWN_KEYS[name]
            problems.append(f"{where}.resources.{name}: is not a custom resource; use the key {key}")
    if not any(wanted_by(task_options(table)).values()):
        problems.append(
            f"{where}.cpus: got 0; ask for something, because Ray does not limit tasks that ask for nothing"
        )
    for key in ("working_dir", "py_modules"):
        value = table.runtime_env.get(key, [])
        problems += (
            f"{where}.runtime_env.{key}: {path!r} would be copied; workers run in the directory that the "
            "campaign is started from, so leave it out, or give a URI"
            for path in (value if isinstance(value, list) else [value])
            if "://" not in str(path)
        )
    variables = table.runtime_env.get("env_vars", {})
    if not isinstance(variables, dict) or not all(isinstance(text, str) for text in variables.values()):
        problems.append(f"{where}.runtime_env.env_vars: needs a table of strings")
    return problems


def pin(node: str) -> dict[str, float]:
    """Return the resource that pins work to one node: every node has one named after its address."""
    return {f"{NODE}{node}": 0.001}


def node_of(resources: Mapping[str, float]) -> str:
    """Return a node's address by its resources."""
    named = (name.removeprefix(NODE) for name in resources if name.startswith(NODE))
    return next((address for address in named if not address.startswith("__")), "")


def task_options(table: RaySection, node: str = "") -> dict[str, Any]:
    """Return each task's resources, as `ray.remote` takes them; a given node pins tasks to it."""
    resources = {**table.resources, **(pin(node) if node else {})}
    more = {"num_gpus": table.gpus, "memory": round(table.memory_gb * 1e9), "resources": resources}
    return {"num_cpus": table.cpus, **{name: value for name, value in more.items() if value}}


def wanted_by(options: Mapping[str, Any]) -> dict[str, float]:
    """Return the resources that a task asks for, by Ray's names of a node's resources."""
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    return {**{name: options.get(key, 0.0) for name, key in named.items()}, **options.get("resources", {})}


def large_enough(
    options: Mapping[str, Any], nodes: Sequence[Mapping[str, float]]
) -> list[Mapping[str, float]]:
    """Return the nodes on which a task can be placed, by their total resources."""
    needs = wanted_by(options).items()
    return [node for node in nodes if all(node.get(name, 0.0) >= need for name, need in needs)]


def what_lacks(options: Mapping[str, Any], nodes: Sequence[Mapping[str, float]]) -> str:
    """Return what no node has of what a task asks for; "" if one is large enough."""
    if large_enough(options, nodes):
        return ""
    needs = wanted_by(options)
    most = {name: max((node.get(name, 0.0) for node in nodes), default=0.0) for name in needs}
    lacking = [
        f"{name} = {need:g} (the most is {most[name]:g})" for name, need in needs.items() if need > most[name]
    ]
    return ", ".join(lacking) or "all that a run asks for at once"


def job_options(assignment: Assignment, table: RaySection) -> dict[str, Any]:
    """Return options of the driver's job, as `submit_job` takes them: no resources, so it is on the head."""
    environment = dict(table.runtime_env)  # tasks have that of their job
    environment["env_vars"] = {**GRACE, **environment.get("env_vars", {})}
    return {"runtime_env": environment, "metadata": {"retrain_campaign": str(assignment.directory)}}


def render(assignment: Assignment, table: RaySection) -> str:
    """Return the script that starts driver and workers; its arguments are a module and that module's."""
    lines = [
        "#!/bin/bash",
        f"# Starts what belongs to {assignment.campaign}: a module of retrain, and its arguments.",
        "umask 077",
        f"cd {shlex.quote(str(assignment.where))} || exit 75",
        f"export RETRAIN_JOB={shlex.quote(f'ray {assignment.campaign}')}",
        *own_permits(assignment, table.permits),
        *table.setup,
        f'exec {shlex.quote(table.python or sys.executable)} -P -m retrain.base.hide_process "$@"',
    ]
    return "\n".join(lines) + "\n"
