"""Watches the files of a run that an engine has; the same for every engine.

The engine's answer is only a hint. A finished run is over, although the engine may list its task for
minutes. A run whose lock is held is alive, whatever happened to its task. A task must be missing from the
engine's list twice. After a task that ended well, the files get time to arrive.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

from retrain.errors import RecordsError
from retrain.launchers import Begun, Ended
from retrain.locks.held import is_held
from retrain.records.layout import RunFiles
from retrain.records.run_state import read_done
from retrain.records.run_toml import recorded_hash

FORGOTTEN = (
    2  # queries without the task: an answer may be older than its submission, or incomplete at a restart
)
ARRIVAL_S = 60.0  # how long a network file system may show an old directory


class EngineWatch:
    """A run that was submitted to an engine."""

    def __init__(self) -> None:
        self.has_begun = False
        self._missing = 0
        self._over_since: float | None = None

    def begin(self, run_id: str) -> list[Begun | Ended]:
        """Return the worker's start at the first call."""
        if self.has_begun:
            return []
        self.has_begun = True
        return [Begun(run_id)]

    def found(self) -> None:
        """Note that the engine lists the run's task."""
        self._missing = 0

    def missed(self, run_id: str, what: str) -> list[Begun | Ended]:
        """Return the run's end if its task is missing for the second time; the run's lock is free.

        Args:
            run_id: of the run.
            what: the engine's answer, for the message.
        """
        self._missing += 1
        if self._missing < FORGOTTEN:
            return []
        return [Ended(run_id, None, f"{what}", goes_on=True, is_lost=True)]

    def has_arrived(self, files: RunFiles) -> bool:
        """Whether done.json exists, or has not appeared in time."""
        with suppress(OSError):
            os.listdir(files.directory)  # noqa: PTH208 - makes a network file system look again
        if files.done.exists():
            return True
        self._over_since = self._over_since or time.monotonic()
        return time.monotonic() - self._over_since > ARRIVAL_S


def is_finished(files: RunFiles) -> bool:
    """Whether a run has finished its configuration and its worker has exited."""
    try:
        done = read_done(files.done) if files.done.exists() else None
        return done is not None and done.config_hash == recorded_hash(files) and not is_held(files.lock)
    except (RecordsError, OSError):
        return False  # reported when the run is concluded


def is_alive(files: RunFiles) -> bool:
    """Whether a worker holds the run's lock."""
    try:
        return is_held(files.lock)
    except RecordsError:
        return False  # reported when the run is concluded


def why_without_a_word(files: RunFiles) -> str:
    """Return where to look if a worker wrote no record; otherwise ""."""
    if files.attempts.exists():
        return ""
    unseen = "" if files.output_log.exists() else " and whether the nodes see that directory"
    return f", before its worker wrote anything; see `retrain logs {files.directory}`{unseen}"
