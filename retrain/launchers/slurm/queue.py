"""Parses squeue's output: the state of each task of each job, and what it means for a run."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from retrain.launchers import Ended
from retrain.launchers.engine import EngineWatch, News, where_to_look

FORMAT = "%i|%T|%j|%r|%o"  # task, state, job's name, reason, script: the last may contain anything
# Ended tasks, which squeue shows for some minutes (MinJobAge); every other state is live.
OVER = frozenset(
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT".split()
)
LOST = frozenset("BOOT_FAIL NODE_FAIL PREEMPTED REVOKED".split())  # ended through no fault of the task
WAITS = frozenset("PENDING CONFIGURING REQUEUED REQUEUE_HOLD REQUEUE_FED RESV_DEL_HOLD SPECIAL_EXIT".split())
# Normal reasons to wait on a busy cluster.
USUAL_REASONS = frozenset(
    "None Priority Resources JobArrayTaskLimit Dependency Licenses BeginTime Reservation Cleaning".split()
)
_TASK = re.compile(r"(\d+)(?:_(\d+))?$")


@dataclass(frozen=True, slots=True)
class Task:
    """A line of squeue."""

    job: int
    index: int | None  # None: tasks that were cancelled together before they started
    state: str
    name: str
    reason: str
    script: str

    @property
    def is_over(self) -> bool:
        return self.state in OVER

    @property
    def waits(self) -> bool:
        return self.state in WAITS

    @property
    def label(self) -> str:
        return f"{self.job}" if self.index is None else f"{self.job}_{self.index}"


def parse(text: str) -> list[Task]:
    """Parse squeue's output; lines without a task are skipped."""
    tasks = []
    for line in text.splitlines():
        fields = line.split("|", 4)
        found = _TASK.match(fields[0])
        if found is not None and len(fields) == 5:
            index = int(found[2]) if found[2] is not None else None
            tasks.append(Task(int(found[1]), index, *fields[1:]))
    return tasks


def job_name(campaign: str) -> str:
    """Return a campaign's job name: its directory's, in characters that are safe in squeue's options."""
    plain = re.sub(r"[^A-Za-z0-9+._-]", "_", campaign)
    return plain if plain == campaign else f"{plain}-{hashlib.sha256(campaign.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, slots=True)
class Names:
    """Job names: the campaign, and the number of the array's first run."""

    campaign: str
    size: int  # of an array
    runs: int

    def all(self) -> list[str]:
        return [self.of(number) for number in range(0, self.runs, self.size)]

    def of(self, number: int) -> str:
        return f"{self.campaign}.{self.first(number)}"

    def first(self, number: int) -> int:
        """Return the number of the first run of the array that a run belongs to."""
        return number // self.size * self.size

    def number(self, task: Task) -> int | None:
        """Return the number of the run that a task is for; None if it belongs to another campaign."""
        campaign, _, first = task.name.rpartition(".")
        if campaign != self.campaign or not first.isdigit() or task.index is None:
            return None
        number = int(first) + task.index
        return number if number < self.runs else None


@dataclass(frozen=True, slots=True)
class Queue:
    """A campaign's tasks, as listed by Slurm."""

    tasks: Mapping[int, Task]  # the newest of each run, by the run's number
    cancelled: frozenset[int]  # jobs with tasks that were cancelled together and are not listed one by one


def read_queue(tasks: Iterable[Task], names: Names, is_ours: Callable[[Task], bool]) -> Queue:
    """Sort squeue's lines by run."""
    found: dict[int, Task] = {}
    cancelled: set[int] = set()
    for task in filter(is_ours, tasks):
        if task.index is None and task.is_over:
            cancelled.add(task.job)
        number = names.number(task)
        if number is not None and (number not in found or found[number].job < task.job):
            found[number] = task
    return Queue(found, frozenset(cancelled))


def is_script(task: Task, script: Path) -> bool:
    """Whether a task runs a campaign's script, and not that of a copy of the campaign."""
    path = Path(task.script.partition("\n")[0])
    try:
        return path == script or not path.exists() or path.samefile(script)
    except (OSError, ValueError):
        return True


def array_of(indices: Iterable[int]) -> str:
    """Return indices in Slurm's notation: 0-3,7."""
    parts = []
    # in a row, an index minus its place among all is constant
    for _, row in groupby(enumerate(sorted(set(indices))), lambda placed: placed[1] - placed[0]):
        first, *rest = (index for _, index in row)
        parts.append(f"{first}-{rest[-1]}" if rest else f"{first}")
    return ",".join(parts)


def news_of(watch: EngineWatch, task: Task | None, cancelled: Collection[int] = ()) -> News:
    """Return what happened to a run, given its newest task and the jobs cancelled as a whole."""
    if task is None or task.job < watch.number:
        if watch.number in cancelled:
            why = f"Slurm ended job {watch.number}: CANCELLED"
            return [Ended(watch.run_id, None, why, taken_back=True)]
        what = f"task {watch.number} of the run" if watch.number else "the run's worker"
        return watch.without_task(f"Slurm no longer knows {what}")
    watch.found()
    watch.number = task.job
    if not task.is_over:
        return [] if task.waits else watch.begin()
    if task.state == "COMPLETED" and not watch.has_arrived():
        return []
    was_cancelled, is_lost = task.state == "CANCELLED", task.state in LOST
    reason = f" ({task.reason})" if task.reason not in ("None", "") else ""
    unseen = "" if was_cancelled else where_to_look(watch.files)
    why = f"Slurm ended task {task.label}: {task.state}{reason}{unseen}"
    ended = Ended(
        watch.run_id, None, why, goes_on=not was_cancelled, is_lost=is_lost, taken_back=was_cancelled
    )
    return [*watch.begin(), ended]


def held_back(tasks: Iterable[Task]) -> dict[str, int]:
    """Count tasks that wait for a reason that may never pass, by Slurm's reason."""
    waiting = (task.reason for task in tasks if task.waits)
    return dict(Counter(reason for reason in waiting if reason not in USUAL_REASONS))
