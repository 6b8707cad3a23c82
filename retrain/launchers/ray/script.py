"""What is submitted to Ray: the driver and a task with their resources, and a test of file locks.

The test is one job on each of two nodes. Ray runs a job on a given node if it requests that node's own
resource, and reports afterwards where it ran. If only one node of the cluster is large enough for a run, no
test is needed: all runs stay on that node.
"""

from __future__ import annotations

import json
import secrets
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from retrain.config.campaign import Ray
from retrain.errors import LaunchError
from retrain.launchers import Assignment
from retrain.launchers.ray.client import LOCAL, Client, said_of
from retrain.launchers.ray.home import Home
from retrain.launchers.shared_permits import MODULE, SHARED, LockTest, own_permits, workers_at_a_time

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


def wanted_of(table: Ray) -> dict[str, float]:
    """Return each task's resources, by Ray's names of a node's resources."""
    return {"CPU": table.cpus, "GPU": table.gpus, "memory": table.memory_gb * 1e9, **table.resources}


def large_enough(table: Ray, nodes: Sequence[Mapping[str, float]]) -> list[Mapping[str, float]]:
    """Return the nodes on which a run can be placed, by their total resources."""
    wanted = wanted_of(table).items()
    return [node for node in nodes if all(node.get(name, 0.0) >= need for name, need in wanted)]


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


class RayLockTest(LockTest):
    """Two jobs on two nodes."""

    def __init__(self, assignment: Assignment, table: Ray, home: Home, client: Client) -> None:
        super().__init__(assignment, home.directory / "locks.json")
        self._table = table
        self._home = home
        self._client = client
        self._nodes: list[str] = []  # addresses of the nodes that are large enough for a run
        self._jobs: list[str] = []

    def node(self, rest: Callable[[float], bool]) -> str | None:
        """Ensure that no shared permit is given out twice: by a test, or by keeping to one node.

        Returns:
            The only node on which runs may be placed; "" for all nodes; None if a stop comes first.

        Raises:
            LaunchError: locks are not shared, or the test cannot run.
        """
        table = self._table
        if table.permits != SHARED or self._assignment.permits is None or table.address == LOCAL:
            return ""
        if self._verdict() != "":
            nodes = large_enough(table, self._client.resources())
            self._nodes = sorted(filter(None, map(node_of, nodes)))
            if len(self._nodes) == 1 and not table.autoscales:
                return self._nodes[0]
            if len(self._nodes) < 2:
                raise LaunchError(
                    f'[campaign.ray].permits = "shared": {len(self._nodes)} nodes are large enough for a run '
                    "at present, but it takes two to test whether nodes see each other's file locks; start "
                    'two, or use permits = "split"'
                )
        return "" if self.is_passed(rest) else None

    def start(self) -> None:
        mark, options = secrets.token_hex(4), job_options(self._assignment, self._table)
        test = ["bash", self._home.script, MODULE, self._path, *self._directories]
        for rank, node in enumerate((self._nodes[0], self._nodes[-1])):
            job = f"{self._home.campaign.name}.locks.{mark}-{rank}"  # unlike a driver's, it ends in no number
            command = shlex.join(map(str, [*test, rank, mark, node]))
            self._jobs.append(job)
            self._client.submit(job, command, {**options, "entrypoint_resources": pin(node)})

    def failure(self) -> str:
        jobs = [job for job in self._client.jobs() if job.id in self._jobs]
        for job in jobs:
            if job.status in ("FAILED", "STOPPED"):
                return f"{said_of(job)}. Do all nodes see {self._home.directory}?"
        nodes = [job.node for job in jobs if job.node]
        return "Ray ran both parts on one node." if len(nodes) > len(set(nodes)) else ""

    def end(self) -> None:
        for job in self._jobs:
            self._client.stop(job)
