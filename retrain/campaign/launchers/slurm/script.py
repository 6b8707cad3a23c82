"""The batch scripts of a campaign, for its arrays and for a test of file locks, and the names of its tasks.

The first lies in the campaign's directory beside `runs.txt` (a run's directory per line; a task knows its
run by the line's number) and `arrays.json` (job name and array size). Its last line replaces the shell by
the worker, so that Slurm's signals reach the worker itself.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from retrain.campaign.launchers import Assignment
from retrain.campaign.launchers.shared_permits import (
    MODULE,
    LockTest,
    directories_of,
    own_permits,
    table_problems,
    workers_at_a_time,
)
from retrain.campaign.launchers.slurm import commands
from retrain.campaign.launchers.slurm.commands import SlurmTask, parse
from retrain.config.resolve import build
from retrain.config.schema import SlurmSection
from retrain.records.files import make_directory, read_json, read_small, write_atomic, write_json

SAVE_S = 60  # seconds before the time limit in which a worker saves its checkpoint
ARGUMENT = re.compile(r" \d+$")  # of the script, which squeue shows as well
UNFIT = '\n\r"\\'  # characters that no #SBATCH line can hold


def slurm_directory(assignment: Assignment) -> Path:
    """Return the directory of the script, the list of runs and Slurm's own output."""
    return assignment.directory / "slurm"


def render(assignment: Assignment, table: SlurmSection) -> str:
    """Return the batch script."""
    home = slurm_directory(assignment)
    lines = [
        "#!/bin/bash",
        f"# A run of {assignment.campaign} per task; the number of the array's first run is the argument:",
        f"# sbatch --array=INDICES%{workers_at_a_time(assignment, table.permits)} job.sh NUMBER",
        *(f"#SBATCH {flag}" for flag in flags(table, home)),
        "umask 077",
        f"cd {shlex.quote(str(assignment.where))} || exit 75",
        f'run=$(sed -n "$(( $1 + SLURM_ARRAY_TASK_ID + 1 ))p" {shlex.quote(str(home / "runs.txt"))})',
        'if [ ! -f "$run/run.toml" ]; then',
        f"  echo retrain: $(hostname) does not see {shlex.quote(str(assignment.directory))}:"
        " put logging.log_dir on a file system that all nodes share >&2",
        "  exit 75",
        "fi",
        "task=${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}",
        f'mv -f {shlex.quote(str(home))}/task-"$task".out "$run/engine-$task.out"',  # what Slurm itself says
        'exec >>"$run/output.log" 2>&1',
        'export RETRAIN_JOB="slurm $task"',
        *own_permits(assignment, table.permits),
        *table.setup,
        f'exec {shlex.quote(table.python or sys.executable)} -P -m retrain.trainer.worker "$run"',
    ]
    return "\n".join(lines) + "\n"


def check_campaign(assignment: Assignment) -> list[str]:
    """Return problems that hold on every cluster."""
    problems = table_problems(assignment, build(SlurmSection, assignment.options), "campaign.slurm")
    if any(character in str(assignment.directory) for character in UNFIT):
        problems.append(
            "[logging].log_dir: no batch script can name a path with quotes, backslashes or newlines"
        )
    return problems


def check_cluster(assignment: Assignment) -> None:
    """Have Slurm judge the script: partition, account, licences, sizes."""
    commands.require_commands()
    table = build(SlurmSection, assignment.options)
    last = min(len(assignment.runs), commands.array_limit()) - 1
    text = render(assignment, table)
    try:
        commands.try_submit(text, [f"--array=0-{last}%{workers_at_a_time(assignment, table.permits)}"])
    except commands.QueueFullError:  # the site's job limit is lower; arrays are then submitted in parts
        commands.try_submit(text, ["--array=0"])


def job_name(campaign: str) -> str:
    """Return a campaign's job name: its directory's, in characters that are safe in squeue's options."""
    plain = re.sub(r"[^A-Za-z0-9+._-]", "_", campaign)
    return plain if plain == campaign else f"{plain}-{hashlib.sha256(campaign.encode()).hexdigest()[:8]}"


@dataclass(frozen=True, slots=True)
class ArrayNames:
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

    def number(self, task: SlurmTask) -> int | None:
        """Return the number of the run that a task is for; None if it belongs to another campaign."""
        campaign, _, first = task.name.rpartition(".")
        if campaign != self.campaign or not first.isdigit() or task.index is None:
            return None
        number = int(first) + task.index
        return number if number < self.runs else None


@dataclass(frozen=True, slots=True)
class Queue:
    """A campaign's tasks, as listed by Slurm."""

    tasks: Mapping[int, SlurmTask]  # the newest of each run, by the run's number
    jobs: frozenset[int]  # with any task listed; waiting tasks that were cancelled are not, or only together


def read_queue(tasks: Iterable[SlurmTask], names: ArrayNames, is_ours: Callable[[SlurmTask], bool]) -> Queue:
    """Sort squeue's lines by run."""
    found: dict[int, SlurmTask] = {}
    jobs: set[int] = set()
    for task in filter(is_ours, tasks):
        jobs.add(task.job)
        number = names.number(task)
        if number is not None and (number not in found or found[number].job < task.job):
            found[number] = task
    return Queue(found, frozenset(jobs))


def is_script(task: SlurmTask, script: Path) -> bool:
    """Whether a task runs a campaign's script, and not that of a copy of the campaign."""
    path = Path(ARGUMENT.sub("", task.script.partition("\n")[0]))
    try:
        return path == script or not path.exists() or path.samefile(script)
    except (OSError, ValueError):
        return True


def numbered_runs(assignment: Assignment) -> list[Path]:
    """Return the runs' directories by their numbers, which a run keeps once `runs.txt` has it.

    Slurm's tasks identify their runs by number only; a process that stops a campaign does not know the order
    of the runs, and a resumed campaign may have other conditions and seeds than at their submission.
    """
    lines = (read_small(slurm_directory(assignment) / "runs.txt") or b"").decode(errors="replace").split("\n")
    directories = {directory.name: directory for directory in assignment.runs.values()}
    listed = [directories.pop(Path(line).name, Path(line)) for line in lines if line]
    return [*listed, *directories.values()]


def kept_names(assignment: Assignment, runs: int) -> ArrayNames:
    """Return the job names and array size of the first submission, by which tasks are found again."""
    home = slurm_directory(assignment)
    path = home / "arrays.json"
    kept = (read_json(path) or {}) if home.is_dir() else {}
    if not {"size", "name"} <= kept.keys():
        kept = {"size": kept.get("size") or commands.array_limit(), "name": job_name(assignment.campaign)}
        make_directory(home)
        write_json(path, kept)
    return ArrayNames(kept["name"], kept["size"], runs)


def flags(table: SlurmSection, home: Path) -> list[str]:
    """Return the options of sbatch that every job of a campaign has."""
    output = str(home / "task").replace("%", "%%")
    options = {
        "partition": table.partition,
        "time": table.time,
        "mem": table.mem,
        "gres": table.gres,
        "cpus-per-task": str(table.cpus or ""),
        "licenses": table.licence,
        "account": table.account,
    }
    return [
        f'--output="{output}-%A_%a.out"',
        "--open-mode=append",
        "--no-requeue",  # what failed is submitted again by retrain, which counts and waits
        f"--signal=B:TERM@{SAVE_S}",
        *(f"--{name}={value}" for name, value in options.items() if value),
        *table.flags,
    ]


def render_lock_test(assignment: Assignment, table: SlurmSection) -> str:
    """Return the batch script in which two nodes test whether they see each other's locks."""
    home = slurm_directory(assignment)
    test = [table.python or sys.executable, "-P", "-m", MODULE]
    command = shlex.join(map(str, [*test, home / "locks.json", *directories_of(assignment)]))
    part = shlex.quote('exec "$@" "$SLURM_PROCID" "$SLURM_JOB_ID" "${SLURMD_NODENAME:-$(hostname)}"')
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {flag}" for flag in flags(replace(table, time="10", licence=""), home)),
        f'#SBATCH --output="{str(home / "locks").replace("%", "%%")}-%j.out"',
        "#SBATCH --nodes=2 --ntasks=2 --ntasks-per-node=1",
        "umask 077",
        f"cd {shlex.quote(str(assignment.where))} || exit 75",
        *table.setup,
        f"exec srun bash -c {part} test {command}",
    ]
    return "\n".join(lines) + "\n"


class SlurmLockTest(LockTest):
    """A job of two tasks on two nodes."""

    def __init__(self, assignment: Assignment, table: SlurmSection) -> None:
        self._home = slurm_directory(assignment)
        super().__init__(assignment, self._home / "locks.json")
        self._table = table
        self._name = f"{job_name(assignment.campaign)}.locks"
        self._job = 0

    def start(self) -> None:
        path = self._home / "locks.sh"
        write_atomic(path, render_lock_test(self._assignment, self._table))
        self._job = commands.submit([f"--job-name={self._name}", str(path)])

    def failure(self) -> str:
        for task in parse(commands.list_tasks([self._name])):
            if task.job == self._job and task.is_over and task.state != "COMPLETED":
                output = self._home / f"locks-{self._job}.out"
                return f"Slurm ended job {task.label}: {task.state}; see {output}."
        return ""

    def end(self) -> None:
        if self._job:
            commands.cancel([str(self._job)], [])
