"""Ray's Jobs API as data: requests to a cluster, and the meaning of their failures.

One HTTP request per query. The library `ray` is imported on first use. With `address = "local"` the only
job, the driver, is a process on this machine, which holds a lock while it lives.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import secrets
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import getitem
from typing import Any

from retrain.base.errors import ClusterDownError, LaunchError
from retrain.base.extras import load
from retrain.base.locks import is_held
from retrain.campaign.launchers.ray.home import Home
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
SEVERAL = re.compile(r"multiple active Ray instances: \{(.*?)\}")
LOCAL = "local"  # as an address; Ray's own name for it
JOB_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # in which Ray gives a job what it was submitted with
SAID = 20  # lines of a local driver's output


@dataclass(frozen=True, slots=True)
class RayJob:
    """A job as listed by Ray."""

    id: str
    status: str
    message: str = ""
    error: str = ""  # Ray's error type
    metadata: Mapping[str, str] = field(default_factory=dict)
    node: str = ""  # Ray's id of the node that it runs or ran on

    @property
    def is_over(self) -> bool:
        """Whether it will never run (again)."""
        return self.status in OVER


class JobsClient:
    """Asks one cluster; connects anew after every failure. Raises ClusterDownError if it does not answer."""

    def __init__(self, address: str = "") -> None:
        self._address = address  # http://HEAD:8265, or one for ray.init; "" for the environment's
        self._connected: Any = None

    def jobs(self) -> list[RayJob]:
        with self._asking() as ray:
            return [_job(found) for found in ray.list_jobs() if found.submission_id]

    def job(self, job: str) -> RayJob | None:
        """Return one job, None if Ray does not know it."""
        with suppress(RequestRefusedError), self._asking() as ray:
            return _job(ray.get_job_info(job))
        return None

    def submit(self, job: str, entrypoint: str, ask: Mapping[str, Any]) -> bool:
        """Submit a job under an id; False if the id was used before.

        After a ClusterDownError the cluster may still have accepted it; a LaunchError is a refusal.
        """
        with suppress(UsedError), self._asking() as ray:
            ray.submit_job(submission_id=job, entrypoint=entrypoint, **ask)
            return True
        return False

    def stop(self, job: str) -> None:
        """Ask a job to end; ignore a job that Ray does not know."""
        with suppress(RequestRefusedError), self._asking() as ray:
            ray.stop_job(job)

    def require_version(self, *, as_here: bool) -> None:
        """Raise LaunchError unless Ray is new enough there, and the same as here if the driver needs that."""
        version = plain(str(self._get("/api/version", "ray_version")), 40)
        if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
            raise LaunchError(
                f"the cluster has Ray {version}; retrain needs {OLDEST[0]}.{OLDEST[1]} or later"
            )
        installed = importlib.metadata.version("ray")
        if as_here and version != installed:
            raise LaunchError(
                f"the cluster has Ray {version}, but this Python has {installed}: install ray=={version} "
                "here, or set [campaign.ray].python to a Python on the nodes with that version"
            )

    def resources(self) -> list[dict[str, float]]:
        """Return the total resources of each live node."""
        nodes = self._get(f"/api/v0/nodes?limit={MOST_NODES}", "data", "result", "result")
        return [node["resources_total"] for node in nodes if node.get("state") == "ALIVE"]

    def _get(self, path: str, *keys: str) -> Any:
        with self._asking() as ray:
            answer = ray._do_request("GET", path)
            answer.raise_for_status()
            return reduce(getitem, keys, answer.json())

    @contextmanager
    def _asking(self) -> Iterator[Any]:
        library = load("ray.job_submission", "ray", "ray")
        from ray.exceptions import RayError

        try:
            if self._connected is None:
                self._connected = self.connect(library)
            yield self._connected
        except (OSError, RuntimeError, ValueError, KeyError, RayError) as error:
            raise self._meaning(error) from error

    def connect(self, library: Any) -> Any:

        class Patient(library.JobSubmissionClient):  # type: ignore[misc]
            def _check_connection_and_version(self, *arguments: Any, **options: Any) -> None:
                """Do nothing: the library would check twice per connection, and before every job."""

            def _do_request(self, *arguments: Any, **options: Any) -> Any:
                return super()._do_request(*arguments, **{"timeout": TIMEOUT_S, **options})

        if not self._address:
            return Patient()
        kept = {name: os.environ.pop(name) for name in ENVIRONMENT if name in os.environ}
        try:
            return Patient(self._address)
        finally:
            os.environ.update(kept)

    def _meaning(self, error: Exception) -> LaunchError:
        text = str(error)
        if USED.search(text):
            return UsedError(text)
        if isinstance(error, RuntimeError) and REFUSED.search(text):
            return RequestRefusedError(f"Ray refuses: {_reason(text)}; see [campaign.ray]")
        self._connected = None
        if several := SEVERAL.search(text):
            running = plain(several[1].replace("'", ""), 200)
            return ClusterDownError(
                f"several Ray clusters run on this machine ({running}): name one by the address of its "
                'dashboard, such as --set campaign.ray.address="http://127.0.0.1:8265"'
            )
        address = self._address or next(filter(None, map(os.environ.get, ENVIRONMENT)), "")
        where = f"at {plain(address, 100)}" if address else "on this machine"
        return ClusterDownError(
            f"no Ray cluster answers {where} ({why_silent(text)}); "
            '[campaign.ray].address is that of its dashboard, such as "http://HEAD:8265"'
        )


class UsedError(LaunchError):
    """The id of a job was used before."""


class RequestRefusedError(LaunchError):
    """The cluster answers, and refuses a request."""


class LocalJobs(JobsClient):
    """Starts and watches drivers on this machine, as a Jobs API does on a cluster."""

    def __init__(self, home: Home, say: Callable[[str], None]) -> None:
        super().__init__()
        self._home = home
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None

    def submit(self, job: str, entrypoint: str, ask: Mapping[str, Any]) -> bool:
        """Start a driver, in the environment that Ray gives the jobs that it starts."""
        self._say("starting a Ray cluster on this machine, which ends with the campaign")
        # our own token; otherwise Ray writes one to the user's home and requires it in every later cluster
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        environment = {**os.environ, **token, "RAY_ADDRESS": LOCAL, JOB_CONFIG: json.dumps(ask)}
        try:
            with self._home.output.open("wb") as output:
                self._process = subprocess.Popen(
                    shlex.split(entrypoint),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    start_new_session=True,
                )
        except OSError as error:
            raise LaunchError(f"Ray could not be started here: {error}") from error
        return True

    def job(self, job: str) -> RayJob:
        """Return the driver's state, with its last output if it has ended."""
        driver = RayJob(job, "RUNNING", metadata={"retrain_campaign": str(self._home.campaign)})
        if is_held(self._home.lock):
            return driver
        if self._process is not None and self._process.poll() is None:
            return replace(driver, status="PENDING")
        message = f"it ended; its whole output is in {self._home.output}:"
        with suppress(OSError):
            lines = self._home.output.read_text(errors="replace").splitlines()
            message = "\n".join([message, *lines[-SAID:]])
        return replace(driver, status="FAILED", message=message, error=BY_COMMAND)


def _job(found: Any) -> RayJob:
    return RayJob(
        id=str(found.submission_id),
        status=str(getattr(found.status, "value", found.status)),
        message=found.message or "",
        error=found.error_type or "",
        metadata=found.metadata or {},
        node=found.driver_node_id or "",
    )


def said_of(job: RayJob) -> str:
    """Return Ray's status of a job that has ended, with the last line of its output."""
    lines = [line for line in job.message.splitlines() if line.strip() and not line.startswith(HEADING)]
    if job.status != "FAILED" or not lines:
        return f"Ray says {job.status} of {job.id}"
    last = f": {plain(lines[-1], 300)}" if len(lines) > 1 else ""  # of a traceback, or of the job's output
    return f"Ray says {job.status} of {job.id} ({plain(lines[0], 200).rstrip(':')}{last})"


def why_silent(text: str) -> str:
    """Return the network error, without the many errors that libraries wrap it in."""
    if found := NETWORK.search(text):
        return found[1] or found[2]
    return plain(_reason(text).partition(". ")[0], 100)


def _reason(text: str) -> str:
    """Return the last error that a traceback names, or the text."""
    named = REASON.findall(text)
    return plain(named[-1][1] if named else text.strip() or "no reason given", 300)
