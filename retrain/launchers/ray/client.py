"""Ray's Jobs API as data: requests to a cluster, and the meaning of their failures.

One HTTP request per query, and one query for all jobs. The library `ray` is imported on first use.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from retrain.errors import EngineDownError, LaunchError
from retrain.extras import load
from retrain.records.text import plain

TIMEOUT_S = 60.0  # a busy head takes seconds; the library itself has no timeout
ENVIRONMENT = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # in Ray they override arguments
OVER = frozenset({"STOPPED", "SUCCEEDED", "FAILED"})
USED = re.compile(r"submission_id \S+ already exists")
REFUSED = re.compile(r"status code 4\d\d")  # the head wraps a refusal by its agent in another error
REASON = re.compile(r"^\s*(?:\w+\.)*(\w*(?:Error|Exception)): (.+)$", re.MULTILINE)
NETWORK = re.compile(r"\[Errno -?\d+\] ([\w ]+)|(timed out)")
NO_ROOM = "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"  # Ray's error types for a timeout
BY_COMMAND = "JOB_ENTRYPOINT_COMMAND_ERROR"  # the job's own exit code
HEADING = "Running entrypoint for job"  # a line that Ray adds to a job's output, perhaps after the job's own
OLDEST = (2, 8)  # supports everything that a job may request
MOST_NODES = 10_000  # the API's own limit


@dataclass(frozen=True, slots=True)
class Job:
    """A job as listed by Ray."""

    id: str
    status: str
    message: str = ""
    error: str = ""  # Ray's error type
    exit_code: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    node: str = ""  # Ray's id of the node that it runs or ran on

    @property
    def is_over(self) -> bool:
        """Whether it will never run (again)."""
        return self.status in OVER


class Client:
    """Asks one cluster; connects anew after every failure."""

    def __init__(self, address: str = "") -> None:
        """Connect on first use.

        Args:
            address: http://HEAD:8265, or an address for ray.init; "" for the environment's.
        """
        self._address = address
        self._connected: Any = None

    def jobs(self) -> list[Job]:
        """List every job of the cluster.

        Raises:
            EngineDownError: it does not answer.
        """
        with self._asking() as ray:
            return [_job(found) for found in ray.list_jobs() if found.submission_id]

    def job(self, job: str) -> Job | None:
        """Return one job, None if Ray does not know it; raises as `jobs` does."""
        try:
            with self._asking() as ray:
                return _job(ray.get_job_info(job))
        except EngineDownError:
            raise
        except LaunchError:
            return None

    def submit(self, job: str, entrypoint: str, ask: Mapping[str, Any]) -> bool:
        """Submit a job under an id; False if the id was used before.

        Raises:
            EngineDownError: the cluster does not answer; it may still have accepted the job.
            LaunchError: it refuses the job.
        """
        try:
            with self._asking() as ray:
                ray.submit_job(submission_id=job, entrypoint=entrypoint, **ask)
        except UsedError:
            return False
        return True

    def stop(self, job: str) -> None:
        """Ask a job to end; ignore a job that Ray does not know. Raises as `jobs` does."""
        try:
            with self._asking() as ray:
                ray.stop_job(job)
        except EngineDownError:
            raise
        except LaunchError:
            pass

    def require_version(self, *, as_here: bool) -> None:
        """Check that Ray is new enough on the cluster, and the same as here if the driver uses this Python.

        Raises as `jobs` does, and LaunchError if it is not.
        """
        with self._asking() as ray:
            answer = ray._do_request("GET", "/api/version")
            answer.raise_for_status()
            version = plain(str(answer.json()["ray_version"]), 40)
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
            oldest = ".".join(map(str, OLDEST))
            raise LaunchError(f"the cluster has Ray {version}; retrain needs {oldest} or later")
        here = importlib.metadata.version("ray")
        if as_here and version != here:
            raise LaunchError(
                f"the cluster has Ray {version}, but this Python has {here}: install ray=={version} here, or "
                "set [campaign.ray].python to a Python on the nodes with that version"
            )

    def resources(self) -> list[dict[str, float]]:
        """Return the total resources of each live node. Raises as `jobs` does."""
        with self._asking() as ray:
            answer = ray._do_request("GET", f"/api/v0/nodes?limit={MOST_NODES}")
            answer.raise_for_status()
            nodes = answer.json()["data"]["result"]["result"]
            return [node["resources_total"] for node in nodes if node.get("state") == "ALIVE"]

    @contextmanager
    def _asking(self) -> Iterator[Any]:
        library = load("ray.job_submission", "ray", "ray")
        from ray.exceptions import RayError

        try:
            if self._connected is None:
                self._connected = _connect(library, self._address)
            yield self._connected
        except (OSError, RuntimeError, ValueError, KeyError, RayError) as error:
            raise self._meaning(error) from error

    def _meaning(self, error: Exception) -> LaunchError:
        text = str(error)
        if USED.search(text):
            return UsedError(text)
        if isinstance(error, RuntimeError) and REFUSED.search(text):
            return LaunchError(f"Ray refuses: {_reason(text)}; see [campaign.ray]")
        self._connected = None
        return EngineDownError(
            f"no Ray cluster answers {self._where()} ({_why_silent(text)}); "
            '[campaign.ray].address is that of its dashboard, such as "http://HEAD:8265"'
        )

    def _where(self) -> str:
        known = self._address or next(filter(None, map(os.environ.get, ENVIRONMENT)), "")
        return f"at {plain(known, 100)}" if known else "on this machine"


class UsedError(LaunchError):
    """The id of a job was used before."""


def _connect(library: Any, address: str) -> Any:
    class Patient(library.JobSubmissionClient):  # type: ignore[misc]
        def _check_connection_and_version(self, *arguments: Any, **options: Any) -> None:
            """Do nothing: the library would check twice per connection, and before every job."""

        def _do_request(self, *arguments: Any, **options: Any) -> Any:
            return super()._do_request(*arguments, **{"timeout": TIMEOUT_S, **options})

    if not address:
        return Patient()
    kept = {name: os.environ.pop(name) for name in ENVIRONMENT if name in os.environ}
    try:
        return Patient(address)
    finally:
        os.environ.update(kept)


def _job(found: Any) -> Job:
    return Job(
        id=str(found.submission_id),
        status=str(getattr(found.status, "value", found.status)),
        message=found.message or "",
        error=found.error_type or "",
        exit_code=found.driver_exit_code,
        metadata=found.metadata or {},
        node=found.driver_node_id or "",
    )


def said_of(job: Job) -> str:
    """Return Ray's status of a job that has ended, with the last line of its output."""
    lines = [line for line in job.message.splitlines() if line.strip() and not line.startswith(HEADING)]
    if job.status != "FAILED" or not lines:
        return f"Ray says {job.status} of {job.id}"
    # the job's own exit codes come with the last lines of its output
    last = f": {plain(lines[-1], 300)}" if job.error == BY_COMMAND and len(lines) > 1 else ""
    return f"Ray says {job.status} of {job.id} ({plain(lines[0], 200).rstrip(':')}{last})"


def _why_silent(text: str) -> str:
    """Return the network error, without the many errors that libraries wrap it in."""
    found = NETWORK.search(text)
    if found:
        return found[1] or found[2]
    return plain(_reason(text).partition(". ")[0], 100)


def _reason(text: str) -> str:
    """Return the last error that a traceback names, or the text."""
    named = REASON.findall(text)
    return plain(named[-1][1] if named else text.strip() or "no reason given", 300)
