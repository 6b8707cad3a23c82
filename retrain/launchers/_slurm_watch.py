"""One run that Slurm was given: what a look at the queue means for it.

Slurm's word is a hint. A task that it calls over while the run's lock is held goes on; one that it has
forgotten is looked for twice; one that it calls completed has a moment for its files to arrive.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Collection, Iterable
from contextlib import suppress

from retrain.errors import RecordsError
from retrain.launchers import Begun, Ended
from retrain.launchers._slurm_queue import USUAL_REASONS, Task
from retrain.records.layout import RunFiles
from retrain.records.locks import is_held

FORGOTTEN = 2  # looks without a task: an answer given while the controller starts may lack some
ARRIVAL_S = 60.0  # how long a network file system may show a directory as it was


class Watch:
    """A run in Slurm's hands."""

    def __init__(self, job: int) -> None:
        """Watch a task of a job; 0: a worker that is alive though Slurm has no task of it."""
        self.job = job
        self.has_begun = False
        self._missing = 0
        self._over_since: float | None = None

    def look(
        self, run_id: str, files: RunFiles, task: Task | None, cancelled: Collection[int] = ()
    ) -> list[Begun | Ended]:
        """Give what has happened, from the run's newest task and the jobs that were cancelled as a whole."""
        if task is None or task.job < self.job:
            if self.job in cancelled:
                return [Ended(run_id, None, f"Slurm ended job {self.job}: CANCELLED", taken_back=True)]
            return self._without_task(run_id, files)
        self._missing = 0
        self.job = task.job
        if not task.is_over:
            return [] if task.waits else self._begin(run_id)
        if task.state == "COMPLETED" and not self._has_arrived(files):
            return []
        return [*self._begin(run_id), _ended(run_id, files, task)]

    def _without_task(self, run_id: str, files: RunFiles) -> list[Begun | Ended]:
        self._missing += 1
        try:
            if is_held(files.lock):
                self._missing = 0
                return self._begin(run_id)
        except RecordsError:
            pass  # whoever concludes says so
        if self._missing < FORGOTTEN:
            return []
        what = f"task {self.job} of it" if self.job else "its worker"
        return [Ended(run_id, None, f"Slurm knows nothing of {what} any more", goes_on=True)]

    def _begin(self, run_id: str) -> list[Begun | Ended]:
        if self.has_begun:
            return []
        self.has_begun = True
        return [Begun(run_id)]

    def _has_arrived(self, files: RunFiles) -> bool:
        """A worker that ends well leaves done.json."""
        with suppress(OSError):
            os.listdir(files.directory)  # noqa: PTH208 - makes a network file system look again
        if files.done.exists():
            return True
        self._over_since = self._over_since or time.monotonic()
        return time.monotonic() - self._over_since > ARRIVAL_S


def held_back(tasks: Iterable[Task]) -> dict[str, int]:
    """Count tasks that wait for something which waiting may never bring, by Slurm's reason."""
    waiting = (task.reason for task in tasks if task.waits)
    return dict(Counter(reason for reason in waiting if reason not in USUAL_REASONS))


def _ended(run_id: str, files: RunFiles, task: Task) -> Ended:
    was_cancelled = task.state == "CANCELLED"
    reason = f" ({task.reason})" if task.reason not in ("None", "") else ""
    why = f"Slurm ended task {task.label}: {task.state}{reason}"
    if not files.attempts.exists() and not was_cancelled:
        why += f", before its worker wrote anything; see `retrain logs {files.directory}`"
        if not files.output_log.exists():
            why += " and whether the nodes see that directory"
    return Ended(run_id, None, why, goes_on=not was_cancelled, taken_back=was_cancelled)
