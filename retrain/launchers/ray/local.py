"""A Ray cluster on this machine only, for a campaign with `address = "local"`.

The driver starts and stops it, and is a separate process instead of a job: so the campaign continues without
the orchestrator, and nothing of Ray remains when it has ended. The driver holds a lock while it lives.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from retrain.errors import EngineDownError, LaunchError
from retrain.launchers.ray.client import BY_COMMAND, Client, Job
from retrain.launchers.ray.home import Home
from retrain.locks.held import hold, is_held

LOCAL = "local"  # as an address; Ray's own name for it
HOST = "127.0.0.1" if sys.platform == "darwin" else "127.0.0.2"  # Ray replaces the first one on Linux
MEMORY = 80_000_000  # bytes of Ray's object store, which no run uses
PATIENCE_S = 60.0  # a driver that is no longer in charge has its workers save and exit
SAID = 20  # lines


class LocalJobs(Client):
    """Starts and watches local drivers, as a Jobs API does on a cluster."""

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
        told = {**token, "RAY_ADDRESS": LOCAL, "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(ask)}
        try:
            with self._home.output.open("wb") as output:
                self._process = subprocess.Popen(
                    shlex.split(entrypoint),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **told},
                    start_new_session=True,
                )
        except OSError as error:
            raise LaunchError(f"Ray could not be started here: {error}") from error
        return True

    def job(self, job: str) -> Job:
        """Return the driver's state, with its last output if it has ended."""
        metadata = {"retrain_campaign": str(self._home.campaign)}
        if is_held(self._home.lock):
            return Job(job, "RUNNING", metadata=metadata)
        if self._process is not None and self._process.poll() is None:
            return Job(job, "PENDING", metadata=metadata)
        said = f"it ended; its whole output is in {self._home.output}:\n{self._last_words()}"
        return Job(job, "FAILED", said, BY_COMMAND, metadata=metadata)

    def _last_words(self) -> str:
        try:
            return "\n".join(self._home.output.read_text(errors="replace").splitlines()[-SAID:])
        except OSError:
            return ""


@contextmanager
def own_ray(home: Home) -> Iterator[dict[str, Any]]:
    """Return arguments of `ray.init` besides the address: none if a cluster started this driver.

    Raises:
        EngineDownError: an earlier driver does not exit.
    """
    if os.environ.get("RAY_ADDRESS") != LOCAL:
        yield {}
        return
    until = time.monotonic() + PATIENCE_S
    while (lock := hold(home.lock)) is None:
        if time.monotonic() > until:
            raise EngineDownError(f"{home.lock}: an earlier driver does not exit")
        time.sleep(0.2)
    # a short name: a socket's path has its limits
    with lock, tempfile.TemporaryDirectory(prefix="retrain-ray-", ignore_cleanup_errors=True) as temporary:
        yield {
            "include_dashboard": False,
            "object_store_memory": MEMORY,
            "_node_ip_address": HOST,
            "_temp_dir": temporary,
        }
