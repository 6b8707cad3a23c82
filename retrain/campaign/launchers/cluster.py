"""What launchers of a cluster with its own queue share: when to query it, and what a run's files say.

One query covers all runs; it is sent every `poll_seconds`, and at least two seconds after the last one. The
cluster's answer is only a hint. A finished run is over, although the cluster may list its task for minutes. A
run whose lock is held is alive, whatever happened to its task. A task must be missing from the cluster's list
twice. After a task that ended well, the files get time to arrive.
"""

from __future__ import annotations

import os
import queue
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from retrain.base.errors import EXIT_DONE, RecordsError
from retrain.base.locks import is_held, signal_holder
from retrain.campaign.launchers import Assignment, Begun, Ended
from retrain.campaign.launchers.shared_permits import workers_at_a_time
from retrain.config.schema import RaySection, SlurmSection
from retrain.records.files import readable
from retrain.records.layout import RunFiles, recorded_hash
from retrain.records.run_state import read_done

FORGOTTEN = 2  # queries without a task: an answer may be older than the submission, or incomplete
ARRIVAL_S = 60.0  # how long a network file system may show an old directory

News: TypeAlias = list[Begun | Ended]  # of runs, in order


class Asking:
    """The schedule of one launcher's queries, and which notices the user gets while they fail."""

    least_s = 2.0  # between two queries
    clock = staticmethod(time.monotonic)

    def __init__(self, cluster: str, every_s: float, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._every_s = every_s
        self._say = say
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._asked_at = self._due_at = float("-inf")
        self._is_silent = False

    def wait(self, timeout_s: float) -> bool:
        """Wait for the next query, `wake` or the timeout; return whether a query is due."""
        wait_s = min(timeout_s, self._due_at - self.clock())
        if wait_s > 0:
            self.rest(wait_s)
        return self.clock() >= self._due_at

    def rest(self, seconds: float) -> bool:
        """Wait for the given seconds or `wake`; return whether it was `wake`."""
        try:
            self._wakeups.get(timeout=seconds)
        except queue.Empty:
            return False
        return True

    def wake(self) -> None:
        """Make `wait` and `rest` return; safe in a signal handler."""
        self._wakeups.put(None)

    @property
    def is_fresh(self) -> bool:
        """Whether the last answer is too recent to query again."""
        return self.clock() - self._asked_at <= self.least_s

    def asked(self) -> None:
        """Note a query; the next one is due at the usual time."""
        self._asked_at = self.clock()
        self._due_at = self._asked_at + self._every_s

    def postpone(self) -> None:
        """Delay the next query: the cluster needs a moment to show what was just submitted."""
        self._due_at = self.clock() + self.least_s

    def hurry(self) -> None:
        """Query as soon as allowed."""
        self._due_at = min(self._due_at, self._asked_at + self.least_s)

    def unanswered(self, why: object) -> None:
        """Report, once, that the cluster does not answer."""
        if not self._is_silent:
            self._say(f"{why}; retrying; its runs continue meanwhile")
        self._is_silent = True

    def answered(self) -> None:
        """Report that the cluster answers again, if it was silent."""
        if self._is_silent:
            self._say(f"{self._cluster} answers again")
        self._is_silent = False


class SubmittedRun:
    """A run that was submitted to a cluster: as Slurm's job, or under a number of Ray's launcher.

    The number 0 is that of a run which is alive although the cluster has no task of it.
    """

    def __init__(self, run_id: str, files: RunFiles, number: int) -> None:
        self.run_id = run_id
        self.files = files
        self.number = number
        self.wish = 0  # 1: is to save and exit, 2: to end at once
        self.has_begun = False
        self.missing = 0  # queries in a row that did not list its task
        self._over_since: float | None = None

    def begin(self) -> News:
        """Return the worker's start at the first call."""
        news: News = [] if self.has_begun else [Begun(self.run_id)]
        self.has_begun = True
        return news

    def finished(self) -> News:
        """Return the run's end if it has finished its configuration and its worker has exited."""
        try:
            done = read_done(self.files.done) if self.files.done.exists() else None
            if done is None or done.config_hash != recorded_hash(self.files) or is_held(self.files.lock):
                return []
        except (RecordsError, OSError):
            return []  # reported when the run is concluded
        return [*self.begin(), Ended(self.run_id, EXIT_DONE)]

    def without_task(self, what: str) -> News:
        """Return the run's end if nothing holds its lock, and its task is missing for the second time."""
        if is_alive(self.files):
            self.missing = 0
            return self.begin()
        self.missing += 1
        return [] if self.missing < FORGOTTEN else [self.lost(what)]

    def lost(self, why: str) -> Ended:
        """Return the end of a run that was lost with its machine, or in the cluster's restart."""
        return Ended(self.run_id, None, why, cut_short=True, is_lost=True)

    def has_arrived(self) -> bool:
        """Whether done.json exists, or has not appeared in time."""
        if self.files.done.name in names_in(self.files.directory):
            return True
        self._over_since = self._over_since or time.monotonic()
        return time.monotonic() - self._over_since > ARRIVAL_S


class ClusterLauncher:
    """Watches runs in a cluster; a subclass submits and cancels them, and looks for what changed."""

    queues = True

    def __init__(self, cluster: str, assignment: Assignment, table: SlurmSection | RaySection) -> None:
        self._cluster = cluster
        self._assignment = assignment
        self._workers = workers_at_a_time(assignment, table.permits)
        self._watched: dict[str, SubmittedRun] = {}
        self.asking = Asking(cluster, table.poll_seconds, assignment.say)  # when the cluster is queried
        self._said: set[str] = set()

    def poll(self, timeout_s: float) -> Sequence[Begun | Ended]:
        return self._poll() if self.asking.wait(timeout_s) else []

    def wake(self) -> None:
        self.asking.wake()

    def _poll(self) -> News:
        """Query the cluster, and return what changed."""
        raise NotImplementedError

    def _each(self, see: Callable[[SubmittedRun], News] = lambda watch: []) -> News:
        """Return what happened to every watched run by its files, else by `see`; forget those that ended."""
        happened: News = []
        for run_id, watch in list(self._watched.items()):
            news = watch.finished() or see(watch)
            if news and isinstance(news[-1], Ended):
                del self._watched[run_id]
            happened += news
        return happened

    def _watch(self, run_id: str, number: int) -> None:
        self._watched[run_id] = SubmittedRun(run_id, RunFiles(self._assignment.runs[run_id]), number)

    def _signal(self, watch: SubmittedRun, *, now: bool) -> None:
        """Ask a worker without a task to save and exit, or kill it; report if that is not possible."""
        reason = "it does not run on this machine; end it where it runs"
        problem = f"{self._cluster} has no task for it, and {reason}"
        try:
            if signal_holder(watch.files.lock, signal.SIGKILL if now else signal.SIGTERM):
                return
        except RecordsError as error:
            problem = str(error)
        self._say_once(f"{watch.run_id}: {problem}")

    def _say_once(self, text: str, about: str = "") -> None:
        if (about or text) not in self._said:
            self._assignment.say(text)
            self._said.add(about or text)


def names_in(directory: Path) -> list[str]:
    """Return a directory's files, none if it is unreachable; a network file system looks again for it."""
    with suppress(OSError):
        return os.listdir(directory)  # noqa: PTH208
    return []


def is_alive(files: RunFiles) -> bool:
    """Whether a worker holds the run's lock; if that cannot be read, the run's end reports it."""
    return bool(readable(is_held, files.lock))


def output_hint(files: RunFiles) -> str:
    """Return where to look if a worker wrote no record; otherwise ""."""
    names = names_in(files.directory)
    if files.attempts.name in names:
        return ""
    unseen = "" if files.output_log.name in names else " and whether the nodes see that directory"
    return f", before its worker wrote anything; see `retrain logs {files.directory}`{unseen}"
