"""One run that Ray is to work on: what a look at its jobs means for it. Ray's word is a hint.

A job that is over while the run's lock is held goes on; one that Ray has forgotten is looked for twice;
one that succeeded has a moment for its files to arrive.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from retrain.errors import RecordsError
from retrain.launchers import Begun, Ended
from retrain.launchers._ray_client import Job
from retrain.launchers._signals import signal_holder
from retrain.records.atomic import write_atomic
from retrain.records.attempts import read_attempts
from retrain.records.layout import RunFiles
from retrain.records.locks import is_held
from retrain.records.text import plain

FORGOTTEN = 2  # looks without a job that was submitted: an answer may be older than the submission
ARRIVAL_S = 60.0  # how long a network file system may show a directory as it was
NO_ROOM = "JOB_SUPERVISOR_ACTOR_START_TIMEOUT"
BY_COMMAND = "JOB_ENTRYPOINT_COMMAND_ERROR"


class Watch:
    """A run in Ray's hands, or in the queue for them."""

    def __init__(self, number: int) -> None:
        """Watch a run's job by its number; 0: a worker that is alive though Ray has no job of it."""
        self.number = number
        self.has_place = number == 0
        self.has_begun = False
        self._missing = 0
        self._over_since: float | None = None

    def look(self, run_id: str, files: RunFiles, job: Job | None, submitted: bool) -> list[Begun | Ended]:
        """Give what has happened.

        Args:
            run_id: of the run.
            files: the run's.
            job: the one with this number; None if Ray knows none.
            submitted: somebody did submit it.
        """
        if job is None:
            return self._without_job(run_id, files, submitted)
        self._missing = 0
        self.has_place = True
        if job.waits:
            return []
        begun = self._begin(run_id)
        if not job.is_over or self.is_alive(files):
            return begun
        if job.status == "SUCCEEDED" and not self._has_arrived(files):
            return begun
        return [*begun, ended(run_id, files, job)]

    def _without_job(self, run_id: str, files: RunFiles, submitted: bool) -> list[Begun | Ended]:
        if self.is_alive(files):
            self._missing, self.has_place = 0, True
            return self._begin(run_id)
        if not submitted and self.number:
            self.has_place = False
            return []
        self._missing += 1
        if self._missing < FORGOTTEN:
            return []
        what = "its job" if self.number else "its worker"
        return [Ended(run_id, None, f"Ray knows nothing of {what} any more", goes_on=True)]

    def _begin(self, run_id: str) -> list[Begun | Ended]:
        if self.has_begun:
            return []
        self.has_begun = True
        return [Begun(run_id)]

    @staticmethod
    def is_alive(files: RunFiles) -> bool:
        """Tell whether a worker holds the run's lock."""
        try:
            return is_held(files.lock)
        except RecordsError:
            return False  # whoever concludes says so

    def _has_arrived(self, files: RunFiles) -> bool:
        """A worker that ends well leaves done.json, or an ending that says why not."""
        with suppress(OSError):
            os.listdir(files.directory)  # noqa: PTH208 - makes a network file system look again
        try:
            attempts = read_attempts(files.attempts)
            if files.done.exists() or (attempts and attempts[-1].ending):
                return True
        except RecordsError:
            return True
        self._over_since = self._over_since or time.monotonic()
        return time.monotonic() - self._over_since > ARRIVAL_S


def ended(run_id: str, files: RunFiles, job: Job) -> Ended:
    """Say how a job ended, in Ray's words where its worker may have left none."""
    why = f"Ray says {job.status} of {job.id}"
    lines = [line for line in job.message.splitlines() if line.strip()]
    if job.status == "FAILED" and lines:
        # the worker's own exit codes come with the last lines of its output
        last = f": {plain(lines[-1], 150)}" if job.error == BY_COMMAND and len(lines) > 1 else ""
        why += f" ({plain(lines[0], 200)}{last})"
    if job.status == "FAILED" and not files.attempts.exists():
        why += f", before its worker wrote anything; see `retrain logs {files.directory}`"
        if not files.output_log.exists():
            why += " and whether the nodes see that directory"
    return Ended(
        run_id,
        None,
        why,
        goes_on=job.status == "FAILED" and job.error != BY_COMMAND,
        taken_back=job.status == "STOPPED",
    )


def keep_words(files: RunFiles, job: Job | None) -> None:
    """Keep what Ray itself said of a job for `retrain logs`; of others the worker's output tells more."""
    if job is None or job.status != "FAILED" or (job.error == BY_COMMAND and files.output_log.exists()):
        return
    with suppress(RecordsError):  # a missing directory or a full disk: whoever concludes says so
        write_atomic(files.directory / f"engine-{job.id}.out", job.message + "\n")


def signal_worker(files: RunFiles, *, now: bool) -> str:
    """Ask a worker that Ray has no job of to save and leave, or end it; gives why that cannot be done."""
    try:
        if signal_holder(files.lock, signal.SIGKILL if now else signal.SIGTERM):
            return ""
    except RecordsError as error:
        return str(error)
    return "Ray has no job of it, and no process here; end it where it runs"
