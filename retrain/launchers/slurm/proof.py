"""Has two nodes of Slurm test whether they see each other's file locks, in a job of its own."""

from __future__ import annotations

from pathlib import Path

from retrain.config.engines import Slurm
from retrain.launchers import Assignment
from retrain.launchers.slurm import commands
from retrain.launchers.slurm.queue import job_name, parse
from retrain.launchers.slurm.script import render_lock_test
from retrain.records.atomic import write_atomic


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
        """Return how it ended, unless well."""
        for task in parse(commands.list_tasks([self._name])):
            if task.job == self._job and task.is_over and task.state != "COMPLETED":
                output = self._home / f"locks-{self._job}.out"
                return f"Slurm ended job {task.label}: {task.state}; see {output}."
        return ""

    def end(self) -> None:
        """Cancel it."""
        if self._job:
            commands.cancel([str(self._job)], [])
