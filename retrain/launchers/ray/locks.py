"""Tests, in one job on each of two Ray nodes, whether the nodes see each other's file locks.

Ray runs a job on a given node if it requests that node's own resource, and reports afterwards where it ran.
If only one node of the cluster is large enough for a run, no test is needed: all runs stay on that node.
"""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Callable

from retrain.config.engines import Ray
from retrain.errors import LaunchError
from retrain.launchers import Assignment
from retrain.launchers.lock_verdict import directories_of, is_proved, read_verdict
from retrain.launchers.permit_split import SHARED
from retrain.launchers.ray.checks import large_enough
from retrain.launchers.ray.client import Client, said_of
from retrain.launchers.ray.home import Home
from retrain.launchers.ray.script import job_options, node_of, pin


class LockTest:
    """Two jobs on two nodes."""

    def __init__(self, assignment: Assignment, table: Ray, home: Home, client: Client) -> None:
        self._assignment = assignment
        self._table = table
        self._home = home
        self._client = client
        self._nodes: list[str] = []  # addresses of the nodes that are large enough for a run
        self._jobs: list[str] = []
        self._verdict = home.directory / "locks.json"

    def node(self, rest: Callable[[float], bool]) -> str | None:
        """Ensure that no shared permit is given out twice: by a test, or by keeping to one node.

        Args:
            rest: waits for some seconds; True if a stop woke it.

        Returns:
            The only node on which runs may be placed; "" for all nodes; None if a stop comes first.

        Raises:
            EngineDownError: the cluster does not answer.
            LaunchError: locks are not shared, or the test cannot run.
        """
        is_local = self._table.address == "local"
        if self._table.permits != SHARED or self._assignment.permits is None or is_local:
            return ""
        directories = directories_of(self._assignment)
        if read_verdict(self._verdict, directories) != "":
            nodes = large_enough(self._table, self._client.resources())
            self._nodes = sorted(filter(None, map(node_of, nodes)))
            if len(self._nodes) == 1 and not self._table.autoscales:
                return self._nodes[0]
            if len(self._nodes) < 2:
                raise LaunchError(
                    f'[campaign.ray].permits = "shared": {len(self._nodes)} nodes are large enough for a run '
                    "at present, but it takes two to test whether nodes see each other's file locks; start "
                    'two, or use permits = "split"'
                )
        return "" if is_proved(self._assignment, self._verdict, self, rest) else None

    def start(self) -> None:
        """Submit both jobs."""
        mark, options = secrets.token_hex(4), job_options(self._assignment, self._table)
        verdict, directories = self._home.directory / "locks.json", directories_of(self._assignment)
        test = ["bash", self._home.script, "retrain.launchers.lock_proof", verdict, *directories]
        for rank, node in enumerate((self._nodes[0], self._nodes[-1])):
            job = f"{self._home.campaign.name}.locks.{mark}-{rank}"  # unlike a driver's, it ends in no number
            command = shlex.join(map(str, [*test, rank, mark, node]))
            self._jobs.append(job)
            self._client.submit(job, command, {**options, "entrypoint_resources": pin(node)})

    def failure(self) -> str:
        """Return which job failed, or that Ray ran both on one node."""
        jobs = [job for job in self._client.jobs() if job.id in self._jobs]
        for job in jobs:
            if job.status in ("FAILED", "STOPPED"):
                return f"{said_of(job)}. Do all nodes see {self._home.directory}?"
        nodes = [job.node for job in jobs if job.node]
        return "Ray ran both parts on one node." if len(nodes) > len(set(nodes)) else ""

    def end(self) -> None:
        """Stop both."""
        for job in self._jobs:
            self._client.stop(job)
