"""Job arrays of a Slurm cluster: one task per run, up to the cap at a time.

Slurm keeps the queue and the cap (`--array=...%K`), so the campaign continues without this process. One
squeue covers all runs. A cap applies to one array only: an array that could exceed it waits for the others.

The batch script lies in the campaign's directory, in `slurm/`, beside `runs.txt` (a run's directory per line)
and `name.json` (the jobs' name). The script's argument plus a task's index is the number of its run's line.
The script's last line replaces the shell by the worker, so that Slurm's signals reach the worker itself.
"""

from __future__ import annotations

import hashlib
import re
import shlex
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from pathlib import Path

from retrain.backends import Devices
from retrain.base.errors import ClusterDownError, LaunchError
from retrain.campaign.launchers import Assignment, Ended
from retrain.campaign.launchers.cluster import ClusterLauncher, News, SubmittedRun, names_in, output_hint
from retrain.campaign.launchers.shared_permits import (
    MODULE,
    SHARED,
    LockTest,
    directories_of,
    own_permits,
    table_problems,
    workers_at_a_time,
)
from retrain.campaign.launchers.slurm import commands
from retrain.campaign.launchers.slurm.commands import LOST, SlurmTask, array_of, held_back, parse
from retrain.config.resolve import build
from retrain.config.schema import SlurmSection
from retrain.records.files import make_directory, read_json, read_small, write_atomic, write_json
from retrain.records.text import count_of

SAVE_S = 60  # seconds before the time limit in which a worker saves its checkpoint
UNFIT = '\n\r"\\'  # characters that no #SBATCH line can hold

COMMANDS = ("sbatch", "squeue", "scancel", "scontrol")  # not sacct, which needs a database


def open_launcher(assignment: Assignment) -> SlurmLauncher:
    """Return a launcher of Slurm tasks; raises LaunchError if Slurm's commands are not here."""
    commands.require_commands()
    return SlurmLauncher(assignment, build(SlurmSection, assignment.options))


def at_a_time(assignment: Assignment) -> int:
    """Return the cap."""
    return workers_at_a_time(assignment, build(SlurmSection, assignment.options).permits)


def script(assignment: Assignment) -> str:
    """Return the batch script."""
    return render(assignment, build(SlurmSection, assignment.options))


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


class SlurmLauncher(ClusterLauncher):
    """Submits, watches and cancels a campaign's tasks."""

    def __init__(self, assignment: Assignment, table: SlurmSection) -> None:
        super().__init__("Slurm", assignment, table)
        self._table = table
        self._home = slurm_directory(assignment)
        self._script = self._home / "job.sh"
        self._listed = numbered_runs(assignment)
        run_ids = {directory: run_id for run_id, directory in assignment.runs.items()}
        self._run_ids = {n: run_ids[path] for n, path in enumerate(self._listed) if path in run_ids}
        self._numbers = {run_id: number for number, run_id in self._run_ids.items()}
        self._firsts: dict[int, int] = {}  # of arrays: the numbers of the runs of their index 0
        self._tasks: Mapping[int, SlurmTask] = {}  # at the last query, the newest of each run, by its number
        self._jobs: set[int] = (
            set()
        )  # with any task listed; not always tasks that were cancelled as they waited
        self._is_unsure = False  # an array may have been accepted although its sbatch failed
        self._caps: dict[int, int] = {}  # of arrays: lower while workers are alive without a task; 0: unknown
        self._part = sys.maxsize  # tasks in one array: what the site accepted last

    def submit(self, run_ids: Sequence[str]) -> Collection[str]:
        """Submit one array per thousand runs, or fewer if the site's limit is lower."""
        if self._is_unsure:
            queued = self.queued()
            self.adopt([run_id for run_id in run_ids if run_id in queued])
            self._is_unsure = False
        # workers that are alive without a task (the controller forgot them) count against the cap
        if self._prepare() and self._cap() > 0:
            left = [run_id for run_id in run_ids if run_id not in self._watched]
            numbers = sorted(self._numbers[run_id] for run_id in left)
            try:
                for place, of_array in groupby(numbers, lambda number: number // self._array_limit):
                    self._submit_in_parts(place * self._array_limit, list(of_array))
            except commands.QueueFullError as error:
                if not self._watched:
                    raise
                more = "; the remaining runs are submitted as running ones end"
                self._say_once(f"{error}{more}", about=more)
            except LaunchError as error:
                self._is_unsure = isinstance(error, ClusterDownError)
                if not any(run_id in self._watched for run_id in left):
                    raise
                self._assignment.say(f"{error}; the remaining runs are submitted later")
            self.asking.postpone()
        return {run_id for run_id in run_ids if run_id in self._watched}

    def queued(self) -> Collection[str]:
        """Ask Slurm for the campaign's tasks that are not over."""
        self._ask()
        live = (number for number, task in self._tasks.items() if not task.is_over)
        return {self._run_ids[number] for number in live if number in self._run_ids}

    def adopt(self, run_ids: Sequence[str]) -> None:
        """Watch tasks that Slurm has, and runs that are alive without one."""
        for run_id in run_ids:
            task = self._tasks.get(self._numbers[run_id])
            job = task.job if task is not None and not task.is_over else 0
            self._watch(run_id, job)
            if job:  # submitted when `max_workers` may have been another
                self._caps.setdefault(job, 0)

    def cancel(self, run_ids: Sequence[str], *, now: bool) -> None:
        """Cancel waiting tasks; send SIGTERM, or SIGKILL, to the workers of the others."""
        for watch in (self._watched[run_id] for run_id in run_ids if run_id in self._watched):
            watch.wish = 2 if now else 1
        self._cancel_wanted()
        self.asking.hurry()

    # Submitting

    def _prepare(self) -> bool:
        """Write what tasks need; False if a stop comes before permits are known to be safe."""
        make_directory(self._home)
        write_json(self._home / "name.json", {"name": self._name})
        write_atomic(self._script, render(self._assignment, self._table))
        write_atomic(self._home / "runs.txt", "".join(f"{path}\n" for path in self._listed))
        if self._table.permits != SHARED or self._assignment.permits is None:
            return True
        return SlurmLockTest(self._assignment, self._table).is_passed(self.asking.rest)

    def _submit_in_parts(self, first: int, left: Sequence[int]) -> None:
        """Submit an array; if the site allows fewer jobs, halve it until it is accepted."""
        was_refused = False
        while left:
            part = left[: self._part]
            indices, cap = array_of(number - first for number in part), self._cap()
            arguments = [f"--array={indices}%{cap}", f"--job-name={self._name}"]
            jobs = {watch.number for watch in self._watched.values() if watch.number}
            if jobs and len(self._watched) + len(part) > self._workers:
                arguments.append(f"--dependency=afterany:{':'.join(map(str, sorted(jobs)))}")
            try:
                job = commands.submit([*arguments, str(self._script), str(first)])
            except commands.QueueFullError:
                self._part = max(1, len(part) // 2)
                if len(part) == 1 or self._watched:  # tried again when some runs have ended
                    raise
                was_refused = True
                continue
            self._caps[job], self._firsts[job] = cap, first
            for number in part:
                self._watch(self._run_ids[number], job)
            left = left[len(part) :]
            if not was_refused and len(part) == self._part:
                self._part *= 2

    def _cap(self) -> int:
        """Return the cap for tasks, less the workers that are alive without one."""
        return self._workers - sum(not watch.number for watch in self._watched.values())

    @cached_property
    def _array_limit(self) -> int:
        return commands.array_limit()

    @cached_property
    def _name(self) -> str:
        """The jobs' name at the first submission, by which tasks are found again."""
        kept = (read_json(self._home / "name.json") if self._home.is_dir() else None) or {}
        return str(kept.get("name") or job_name(self._assignment.campaign))

    # Polling

    def _ask(self) -> None:
        try:
            tasks = parse(commands.list_tasks(self._name))
        finally:
            self.asking.asked()
        ours = [task for task in tasks if is_script(task, self._script)]
        self._firsts |= {task.job: task.first for task in ours}
        self._tasks, self._jobs = newest_by_run(ours), {task.job for task in ours}

    def _poll(self) -> News:
        try:
            self._ask()
        except ClusterDownError as error:
            self.asking.unanswered(error)
            return self._each()
        self.asking.answered()
        for reason, count in held_back(self._tasks.values()).items():
            self._say_once(f"Slurm holds {count_of(count, 'run')} back: {reason}", about=reason)
        self._cancel_wanted()
        happened = self._each(
            lambda watch: news_of(watch, self._tasks.get(self._numbers[watch.run_id]), self._jobs)
        )
        cap = self._cap()
        for job in [job for job, its_cap in self._caps.items() if its_cap != cap > 0]:
            try:
                commands.set_cap(job, cap)
                self._caps[job] = cap
            except ClusterDownError:
                break  # at the next poll
            except LaunchError as error:
                self._assignment.say(f"{error}; the cap of job {job} stays as it is")
                del self._caps[job]
        return happened

    # Ending

    def _cancel_wanted(self) -> None:
        """Cancel what is to be cancelled; later if Slurm does not answer."""
        try:
            for wish in (1, 2):
                waiting, started = dict[int, list[int]](), dict[int, list[int]]()
                watches = [watch for watch in self._watched.values() if watch.wish == wish]
                for watch in watches:
                    number, job = self._numbers[watch.run_id], watch.number
                    if not job:
                        self._signal(watch, now=wish > 1)
                        continue
                    task = self._tasks.get(number)
                    has_started = task is not None and task.job == job and not task.waits
                    group = started if has_started else waiting
                    group.setdefault(job, []).append(number - self._firsts[job])
                # a task that starts at this moment gets SIGTERM first, and time to save a checkpoint
                commands.cancel(_labels(waiting), [])
                commands.cancel(_labels(started), ["--batch", f"--signal={'KILL' if wish > 1 else 'TERM'}"])
                for watch in watches:
                    watch.wish = 0
        except ClusterDownError as error:
            self._say_once(f"{error}; no further run starts, and running ones are stopped later")
        except LaunchError as error:
            for watch in self._watched.values():
                watch.wish = 0
            self._assignment.say(str(error))


def news_of(watch: SubmittedRun, task: SlurmTask | None, jobs: Collection[int] = ()) -> News:
    """Return what happened to a run, given its newest task and the jobs of which Slurm lists any task."""
    if task is None or task.job < watch.number:
        if watch.number in jobs and not watch.has_begun:
            # a task moves its output into the run's directory first; an unreachable one has no names
            names = names_in(watch.files.directory)
            if names and not any(name.startswith(f"engine-{watch.number}_") for name in names):
                why = f"its task of job {watch.number} was cancelled in Slurm before it started"
                return [Ended(watch.run_id, None, why, taken_back=True)]
        what = f"task {watch.number} of the run" if watch.number else "the run's worker"
        return watch.without_task(f"Slurm no longer knows {what}")
    watch.missing = 0
    watch.number = task.job
    if not task.is_over:
        return [] if task.waits else watch.begin()
    if task.state == "COMPLETED" and not watch.has_arrived():
        return []
    by_hand, is_lost = task.state == "CANCELLED", task.state in LOST
    reason = f" ({task.reason})" if task.reason not in ("None", "") else ""
    unseen = "" if by_hand else output_hint(watch.files)
    why = f"Slurm ended task {task.label}: {task.state}{reason}{unseen}"
    ended = Ended(watch.run_id, None, why, cut_short=not by_hand, is_lost=is_lost, taken_back=by_hand)
    return [*watch.begin(), ended]


def job_name(campaign: str) -> str:
    """Return a campaign's job name: its directory's, in characters that are safe in squeue's options."""
    plain = re.sub(r"[^A-Za-z0-9+._-]", "_", campaign)
    return plain if plain == campaign else f"{plain}-{hashlib.sha256(campaign.encode()).hexdigest()[:8]}"


def numbered_runs(assignment: Assignment) -> list[Path]:
    """Return the runs' directories by their numbers, which a run keeps once `runs.txt` has it.

    Slurm's tasks identify their runs by number only; a process that stops a campaign does not know the order
    of the runs, and a resumed campaign may have other conditions and seeds than at their submission.
    """
    lines = (read_small(slurm_directory(assignment) / "runs.txt") or b"").decode(errors="replace").split("\n")
    directories = {directory.name: directory for directory in assignment.runs.values()}
    listed = [directories.pop(Path(line).name, Path(line)) for line in lines if line]
    return [*listed, *directories.values()]


def newest_by_run(tasks: Iterable[SlurmTask]) -> dict[int, SlurmTask]:
    """Return the newest task of each run by the run's number."""
    in_order = sorted(tasks, key=lambda task: task.job)
    return {task.first + task.index: task for task in in_order if task.index is not None}


def is_script(task: SlurmTask, script: Path) -> bool:
    """Whether a task runs a campaign's script, and not that of a copy of the campaign."""
    path = Path(commands.ARGUMENT.sub("", task.script))
    try:
        return path == script or not path.exists() or path.samefile(script)
    except (OSError, ValueError):
        return True


def _labels(tasks: Mapping[int, list[int]]) -> list[str]:
    return [f"{job}_[{array_of(indices)}]" for job, indices in tasks.items()]


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
        *(f"#SBATCH {flag}" for flag in flags(table, home, assignment.devices)),
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


def flags(table: SlurmSection, home: Path, devices: Devices) -> list[str]:
    """Return the options of sbatch that every job of a campaign has."""
    output = str(home / "task").replace("%", "%%")
    gpus = 0 if any("gpu" in option for option in (table.gres, *table.flags)) else devices.gpus
    options = {
        "partition": table.partition,
        "time": table.time,
        "mem": table.mem,
        "gres": table.gres,
        "nodes": str(devices.nodes) if devices.nodes > 1 else "",
        "ntasks-per-node": "1" if devices.nodes > 1 else "",
        "gpus-per-node": str(gpus or ""),
        "cpus-per-task": str(max(table.cpus, devices.cores) or ""),
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
        *(f"#SBATCH {flag}" for flag in flags(replace(table, time="10", licence=""), home, Devices())),
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
        for task in parse(commands.list_tasks(self._name)):
            if task.job == self._job and task.is_over and task.state != "COMPLETED":
                output = self._home / f"locks-{self._job}.out"
                return f"Slurm ended job {task.label}: {task.state}; see {output}."
        return ""

    def end(self) -> None:
        if self._job:
            commands.cancel([str(self._job)], [])
