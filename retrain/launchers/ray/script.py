"""What is submitted to Ray: resources of the driver and of a task, and the script that starts both."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from retrain.config.engines import Ray
from retrain.launchers import Assignment
from retrain.launchers.permit_split import own_permits, workers_at_a_time

# Ray ends a stopped job with SIGKILL after 3 s by default, too soon for a checkpoint; this is a day.
GRACE = {"RAY_JOB_STOP_WAIT_TIME_S": "86400"}
NODE = "node:"  # followed by a node's address
DRIVER = "retrain.launchers.ray.driver"


def pin(node: str) -> dict[str, float]:
    """Return the resource that pins work to one node: every node has one named after its address."""
    return {f"{NODE}{node}": 0.001}


def node_of(resources: Mapping[str, float]) -> str:
    """Return a node's address by its resources."""
    named = (name.removeprefix(NODE) for name in resources if name.startswith(NODE))
    return next((address for address in named if not address.startswith("__")), "")


def task_options(table: Ray, node: str = "") -> dict[str, Any]:
    """Return each task's resources, as `ray.remote` takes them; a given node pins tasks to it."""
    options: dict[str, Any] = {
        "num_cpus": table.cpus,
        "num_gpus": table.gpus,
        "memory": round(table.memory_gb * 1e9),
        "resources": {**table.resources, **(pin(node) if node else {})},
    }
    return {name: value for name, value in options.items() if value or name == "num_cpus"}


def job_options(assignment: Assignment, table: Ray) -> dict[str, Any]:
    """Return options of the driver's job, as `submit_job` takes them: no resources, so it is on the head."""
    environment = dict(table.runtime_env)  # tasks have that of their job
    environment["env_vars"] = {**GRACE, **environment.get("env_vars", {})}
    return {"runtime_env": environment, "metadata": {"retrain_campaign": str(assignment.directory)}}


def render(assignment: Assignment, table: Ray) -> str:
    """Return the script that starts driver and workers; its arguments are a module and that module's."""
    lines = [
        "#!/bin/bash",
        f"# Starts what belongs to {assignment.campaign}: a module of retrain, and its arguments.",
        "umask 077",
        f"cd {shlex.quote(str(assignment.where))} || exit 75",
        f"export RETRAIN_JOB={shlex.quote(f'ray {assignment.campaign}')}",
        *own_permits(assignment, table.permits),
        *table.setup,
        f'exec {shlex.quote(table.python or sys.executable)} -P -m "$@"',
    ]
    return "\n".join(lines) + "\n"


def shown(assignment: Assignment, table: Ray) -> str:
    """Write what would be submitted, for `retrain explain`."""
    environment = job_options(assignment, table)["runtime_env"]
    environment["env_vars"] = dict.fromkeys(environment["env_vars"], "...")  # may hold secrets
    script = f"bash {assignment.directory}/ray/job.sh"
    lines = [
        "# One job, the driver, on the head of the cluster:",
        f"#   submission_id = {assignment.campaign}.NUMBER",
        f"#   runtime_env = {json.dumps(environment)}",
        f"#   {script} {DRIVER} CAMPAIGN_DIR NUMBER",
        f"# which keeps {workers_at_a_time(assignment, table.permits)} tasks at a time, each asking Ray for",
        *(f"#   {name} = {json.dumps(value)}" for name, value in task_options(table).items()),
        f"# and running `{script} retrain.worker RUN_DIR`; the script is",
    ]
    return "\n".join(lines) + "\n" + render(assignment, table)
