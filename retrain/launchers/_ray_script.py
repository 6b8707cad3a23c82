"""What is submitted to Ray: the resources of a job, and the script that all jobs of a campaign run."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrain.config.engines import Ray
from retrain.launchers import Assignment
from retrain.launchers._ray_queue import Terms
from retrain.launchers.lock_verdict import directories_of
from retrain.launchers.permit_split import own_permits, workers_at_a_time

# Ray ends a stopped job with SIGKILL after 3 s by default, too soon for a checkpoint; this is a day.
GRACE = {"RAY_JOB_STOP_WAIT_TIME_S": "86400"}
NODE = "node:"  # followed by a node's address
NEIGHBOURS_LOOKS = 6  # of an orchestrator: one of a job is a process of its own


def terms_of(assignment: Assignment, table: Ray, node: str = "") -> Terms:
    """Return what holds for all jobs; they keep to a node if one is given."""
    ask = ask_of(assignment, table)
    if node:
        ask["entrypoint_resources"] = {**table.resources, **pin(node)}
    return Terms(ask, table.share_seconds, NEIGHBOURS_LOOKS * table.poll_seconds)


def pin(node: str) -> dict[str, float]:
    """Return the resource by which Ray runs a job on one node: every node has one of its own address."""
    return {f"{NODE}{node}": 0.001}


def node_of(resources: Mapping[str, float]) -> str:
    """Return a node's address by its resources."""
    named = (name.removeprefix(NODE) for name in resources if name.startswith(NODE))
    return next((address for address in named if not address.startswith("__")), "")


def ask_of(assignment: Assignment, table: Ray) -> dict[str, Any]:
    """Return what each job asks for, as `submit_job` takes it."""
    ask: dict[str, Any] = {
        "entrypoint_num_cpus": table.cpus,
        "entrypoint_num_gpus": table.gpus,
        "entrypoint_memory": round(table.memory_gb * 1e9),
        "entrypoint_resources": dict(table.resources),
    }
    environment = dict(table.runtime_env)
    environment["env_vars"] = {**GRACE, **environment.get("env_vars", {})}
    metadata = {"retrain_campaign": str(assignment.directory)}
    return {**{name: value for name, value in ask.items() if value}, "runtime_env": environment} | {
        "metadata": metadata
    }


def render(assignment: Assignment, table: Ray) -> str:
    """Write the script that a job runs, with a run's directory and the job's id as arguments."""
    python = table.python or sys.executable
    place = [python, "-P", "-m", "retrain.launchers._ray_place", str(assignment.directory)]
    lines = [
        "#!/bin/bash",
        f"# A run of {assignment.campaign}: its directory and the job's id are the arguments.",
        "umask 077",
        'exec >>"$1/output.log" 2>&1',
        f"cd {shlex.quote(str(assignment.where))} || exit 75",
        'export RETRAIN_JOB="ray $2"',
        *own_permits(assignment, table.permits),
        *table.setup,
        f'exec {shlex.join(place)} "$2"',
    ]
    return "\n".join(lines) + "\n"


def render_lock_test(assignment: Assignment, table: Ray, home: Path) -> str:
    """Write the script of the two jobs that test file locks, with rank, mark and node as arguments."""
    test = [table.python or sys.executable, "-P", "-m", "retrain.launchers.lock_proof"]
    lines = [
        "#!/bin/bash",
        "umask 077",
        f"cd {shlex.quote(str(assignment.where))} || exit 75",
        *table.setup,
        f'exec {shlex.join(map(str, [*test, home / "locks.json", *directories_of(assignment)]))} "$@"',
    ]
    return "\n".join(lines) + "\n"


def shown(assignment: Assignment, table: Ray) -> str:
    """Write what would be submitted, for `retrain explain`."""
    ask = ask_of(assignment, table)
    environment = dict(ask["runtime_env"])
    environment["env_vars"] = dict.fromkeys(environment["env_vars"], "...")  # may hold secrets
    asked = {name: value for name, value in ask.items() if name.startswith("entrypoint")}
    lines = [
        f"# {workers_at_a_time(assignment, table.permits)} jobs at a time, each asking Ray for",
        *(f"#   {name} = {json.dumps(value)}" for name, value in asked.items()),
        f"#   runtime_env = {json.dumps(environment)}",
        f"#   submission_id = {assignment.campaign}.RUN.NUMBER",
        f"# and running `bash {assignment.directory}/ray/job.sh RUN_DIR SUBMISSION_ID`, which is",
    ]
    return "\n".join(lines) + "\n" + render(assignment, table)
