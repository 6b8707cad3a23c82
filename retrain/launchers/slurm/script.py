"""The batch script: one for all arrays of a campaign; each task finds its run by its number.

It lies in the campaign's directory beside `runs.txt`, which has a run's directory in each line. Its
last line replaces the shell by the worker, so that Slurm's signals reach the worker itself.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path

from retrain.config.engines import Slurm
from retrain.errors import records_error
from retrain.launchers import Assignment
from retrain.launchers.lock_verdict import directories_of
from retrain.launchers.permit_split import own_permits, workers_at_a_time

SAVE_S = 60  # seconds before the time limit in which a worker saves its checkpoint
UNFIT = '\n\r"\\'  # characters that no line of #SBATCH can carry


def slurm_directory(assignment: Assignment) -> Path:
    """Where the script, the list of runs and Slurm's own output lie."""
    return assignment.directory / "slurm"


def render(assignment: Assignment, table: Slurm) -> str:
    """Write the batch script."""
    home = slurm_directory(assignment)
    lines = [
        "#!/bin/bash",
        f"# A run of {assignment.campaign} per task; the number of the array's first run is the argument:",
        f"# sbatch --array=INDICES%{workers_at_a_time(assignment, table.permits)} job.sh NUMBER",
        *(f"#SBATCH {flag}" for flag in _flags(assignment, table, home)),
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
        f'exec {shlex.quote(table.python or sys.executable)} -P -m retrain.worker "$run"',
    ]
    return "\n".join(lines) + "\n"


def render_lock_test(assignment: Assignment, table: Slurm) -> str:
    """Write the batch script in which two nodes test whether they see each other's locks."""
    home = slurm_directory(assignment)
    test = [table.python or sys.executable, "-P", "-m", "retrain.launchers.lock_proof"]
    command = shlex.join(map(str, [*test, home / "locks.json", *directories_of(assignment)]))
    part = shlex.quote('exec "$@" "$SLURM_PROCID" "$SLURM_JOB_ID" "${SLURMD_NODENAME:-$(hostname)}"')
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {flag}" for flag in _flags(assignment, replace(table, time="10", licence=""), home)),
        f'#SBATCH --output="{str(home / "locks").replace("%", "%%")}-%j.out"',
        "#SBATCH --nodes=2 --ntasks=2 --ntasks-per-node=1",
        "umask 077",
        f"cd {shlex.quote(str(assignment.where))} || exit 75",
        *table.setup,
        f"exec srun bash -c {part} test {command}",
    ]
    return "\n".join(lines) + "\n"


def numbered_runs(assignment: Assignment) -> list[Path]:
    """Return the runs' directories by their numbers, which a run keeps once `runs.txt` has it.

    Slurm's tasks know their runs by number alone; who stops a campaign knows no order of its runs, and
    one that is resumed may have other conditions and seeds than when they were submitted.

    Raises:
        RecordsError: the list cannot be read.
    """
    path = slurm_directory(assignment) / "runs.txt"
    try:
        known = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        known = []
    except OSError as error:
        raise records_error(path, "read", error) from error
    given = {directory.name: directory for directory in assignment.runs.values()}
    listed = [given.pop(Path(line).name, Path(line)) for line in known if line]
    return [*listed, *given.values()]


def _flags(assignment: Assignment, table: Slurm, home: Path) -> list[str]:
    output = str(home / "task").replace("%", "%%")
    wanted = {
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
        *(f"--{name}={value}" for name, value in wanted.items() if value),
        *table.flags,
    ]
