"""A job in which two Slurm nodes test whether they see each other's file locks."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path

from retrain.config.engines import Slurm
from retrain.launchers import Assignment
from retrain.launchers.lock_verdict import directories_of
from retrain.launchers.slurm import commands
from retrain.launchers.slurm.queue import job_name, parse
from retrain.launchers.slurm.script import flags, slurm_directory
from retrain.records.atomic import write_atomic


def render_lock_test(assignment: Assignment, table: Slurm) -> str:
    """Write the batch script in which two nodes test whether they see each other's locks."""
    home = slurm_directory(assignment)
    test = [table.python or sys.executable, "-P", "-m", "retrain.launchers.lock_proof"]
    command = shlex.join(map(str, [*test, home / "locks.json", *directories_of(assignment)]))
    part = shlex.quote('exec "$@" "$SLURM_PROCID" "$SLURM_JOB_ID" "${SLURMD_NODENAME:-$(hostname)}"')
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {flag}" for flag in flags(assignment, replace(table, time="10", licence=""), home)),
        f'#SBATCH --output="{str(home / "locks").replace("%", "%%")}-%j.out"',
        "#SBATCH --nodes=2 --ntasks=2 --ntasks-per-node=1",
        "umask 077",
        f"cd {shlex.quote(str(assignment.where))} || exit 75",
        *table.setup,
        f"exec srun bash -c {part} test {command}",
    ]
    return "\n".join(lines) + "\n"


class LockTest:
    """A job of two tasks on two nodes."""

    def __init__(self, assignment: Assignment, table: Slurm, home: Path) -> None:
        self._assignment = assignment
        self._table = table
        self._home = home
        self._name = f"{job_name(assignment.campaign)}.locks"
        self._job = 0

    def start(self) -> None:
        """Submit it."""
        path = self._home / "locks.sh"
        write_atomic(path, render_lock_test(self._assignment, self._table))
        self._job = commands.submit([f"--job-name={self._name}", str(path)])

    def failure(self) -> str:
        """Return how the job failed; "" if it has not."""
        for task in parse(commands.list_tasks([self._name])):
            if task.job == self._job and task.is_over and task.state != "COMPLETED":
                output = self._home / f"locks-{self._job}.out"
                return f"Slurm ended job {task.label}: {task.state}; see {output}."
        return ""

    def end(self) -> None:
        """Cancel it."""
        if self._job:
            commands.cancel([str(self._job)], [])
