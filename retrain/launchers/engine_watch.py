"""What a run's files say of it while it is in an engine's hands, whatever the engine.

The engine's word is a hint. A run that has finished is over, though the engine may show its task for minutes
more. A run whose lock is held goes on, whatever became of its task; a task that
the engine has forgotten is looked for twice; one that ended well has a moment for its files to arrive.
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

FORGOTTEN = 2  # looks without a task: an answer may be older than its submission, or lack some at a restart
ARRIVAL_S = 60.0  # how long a network file system may show a directory as it was


class EngineWatch:
    """A run in an engine's hands."""

    def __init__(self) -> None:
        self.has_begun = False
        self._missing = 0
        self._over_since: float | None = None

    def begin(self, run_id: str) -> list[Begun | Ended]:
        """Say that the worker has started, once."""
        if self.has_begun:
            return []
        self.has_begun = True
        return [Begun(run_id)]

    def found(self) -> None:
        """The engine knows the run's task."""
        self._missing = 0

    def missed(self, run_id: str, what: str) -> list[Begun | Ended]:
        """The engine does not know the run's task, and nobody works on the run.

        Args:
            run_id: of the run.
            what: who knows nothing of what, for the message.
        """
        self._missing += 1
        if self._missing < FORGOTTEN:
            return []
        return [Ended(run_id, None, f"{what} any more", goes_on=True, is_lost=True)]

    def has_arrived(self, files: RunFiles) -> bool:
        """Whether done.json is there, as after every good end, or was waited for in vain."""
        with suppress(OSError):
            os.listdir(files.directory)  # noqa: PTH208 - makes a network file system look again
        if files.done.exists():
            return True
        self._over_since = self._over_since or time.monotonic()
        return time.monotonic() - self._over_since > ARRIVAL_S


def is_finished(files: RunFiles) -> bool:
    """Whether a run has finished its configuration and its worker has left."""
    try:
        done = read_done(files.done) if files.done.exists() else None
        return done is not None and done.config_hash == recorded_hash(files) and not is_held(files.lock)
    except (RecordsError, OSError):
        return False  # whoever concludes says so


def is_alive(files: RunFiles) -> bool:
    """Whether a worker holds the run's lock."""
    try:
        return is_held(files.lock)
    except RecordsError:
        return False  # whoever concludes says so


def why_without_a_word(files: RunFiles) -> str:
    """Return what to look at if a worker wrote nothing at all; nothing if it did."""
    if files.attempts.exists():
        return ""
    unseen = "" if files.output_log.exists() else " and whether the nodes see that directory"
    return f", before its worker wrote anything; see `retrain logs {files.directory}`{unseen}"
