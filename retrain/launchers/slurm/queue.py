"""What squeue says, as data: which task of which job is in which state."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

FORMAT = "%i|%T|%j|%r|%o"  # task, state, job's name, reason, script: the last may hold anything
# What is over, as squeue shows it for some minutes (MinJobAge); every other state is a live one.
OVER = frozenset(
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT".split()
)
LOST = frozenset("BOOT_FAIL NODE_FAIL PREEMPTED REVOKED".split())  # over by no doing of the task's
WAITS = frozenset("PENDING CONFIGURING REQUEUED REQUEUE_HOLD REQUEUE_FED RESV_DEL_HOLD SPECIAL_EXIT".split())
# Reasons for which every busy cluster lets tasks wait.
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
        """Whether it will never run (again)."""
        return self.state in OVER

    @property
    def waits(self) -> bool:
        """Whether it has not started."""
        return self.state in WAITS

    @property
    def label(self) -> str:
        """Name it as Slurm's commands do."""
        return f"{self.job}" if self.index is None else f"{self.job}_{self.index}"


def parse(text: str) -> list[Task]:
    """Read squeue's answer; lines that name no task are passed over."""
    tasks = []
    for line in text.splitlines():
        fields = line.split("|", 4)
        found = _TASK.match(fields[0])
        if found is not None and len(fields) == 5:
            index = int(found[2]) if found[2] is not None else None
            tasks.append(Task(int(found[1]), index, *fields[1:]))
    return tasks


def job_name(campaign: str) -> str:
    """Name a campaign's jobs after its directory, in letters that squeue neither splits nor matches."""
    plain = re.sub(r"[^A-Za-z0-9+._-]", "_", campaign)
    return plain if plain == campaign else f"{plain}-{hashlib.sha256(campaign.encode()).hexdigest()[:8]}"


class Names:
    """Job names that say which runs a job has: the campaign, and the number of its array's first run."""

    def __init__(self, campaign: str, size: int, runs: int) -> None:
        self._campaign = campaign
        self._size = size
        self._runs = runs

    def all(self) -> list[str]:
        """Return the names that jobs of this campaign may have."""
        return [self.of(number) for number in range(0, self._runs, self._size)]

    def of(self, number: int) -> str:
        """Name the job of a run."""
        return f"{self._campaign}.{self.first(number)}"

    def first(self, number: int) -> int:
        """Return the number of the first run of the array that a run belongs to."""
        return number // self._size * self._size

    def number(self, task: Task) -> int | None:
        """Return the number of the run that a task is for; None if it is none of this campaign's."""
        campaign, _, first = task.name.rpartition(".")
        if campaign != self._campaign or not first.isdigit() or task.index is None:
            return None
        number = int(first) + task.index
        return number if number < self._runs else None


@dataclass(frozen=True, slots=True)
class Queue:
    """What Slurm has of a campaign."""

    tasks: Mapping[int, Task]  # the newest of each run, by the run's number
    cancelled: frozenset[int]  # jobs of which tasks were cancelled together, and are not listed one by one


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
    """Write indices as Slurm does: 0-3,7."""
    parts: list[str] = []
    start = last = -2
    for index in sorted(set(indices)):
        if index != last + 1:
            parts += [_range(start, last)] if last >= 0 else []
            start = index
        last = index
    return ",".join([*parts, *([_range(start, last)] if last >= 0 else [])])


def _range(start: int, last: int) -> str:
    return str(start) if start == last else f"{start}-{last}"
