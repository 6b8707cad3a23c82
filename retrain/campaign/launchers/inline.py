"""Workers in this process, one after another: for debugging, and for tests of your own plugins.

A worker here cannot be killed, so a stop of any kind, and Ctrl-C, end it at its next step boundary;
`run_timeout` and `stall_timeout` have no effect, because nothing watches the worker.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress

from retrain.base.errors import LaunchError
from retrain.base.threads import limited
from retrain.campaign.launchers import Assignment, Ended
from retrain.config.keys import Tables
from retrain.records.files import open_log
from retrain.records.layout import RunFiles
from retrain.trainer import worker


def open_launcher(assignment: Assignment) -> InlineLauncher:
    """Return a launcher that runs in this process."""
    return InlineLauncher(assignment)


def runs_here(options: Tables) -> bool:
    """Return True."""
    del options
    return True


def unused_keys(options: Tables) -> Mapping[str, str]:
    """Return the keys for which several workers, or a process beside the worker, are needed."""
    del options
    return {
        "parallel": "runs take turns in this process",
        "run_timeout": "no other process watches the time",
        "stall_timeout": "no other process watches the time",
    }


class InlineLauncher:
    """Runs each submitted worker to its end, inside `submit`."""

    queues = False

    def __init__(self, assignment: Assignment) -> None:
        self._runs = assignment.runs
        self._ended: list[Ended] = []
        self._stop = threading.Event()

    def submit(self, run_ids: Sequence[str]) -> Collection[str]:
        """Run workers to their ends; the output of each goes to its run's output.log."""
        for run_id in run_ids:
            directory = self._runs[run_id]
            log = open(open_log(RunFiles(directory).output_log), "w", encoding="utf-8")  # noqa: PTH123, SIM115
            try:
                with limited(), redirect_stdout(log), redirect_stderr(log):
                    self._ended.append(Ended(run_id, worker.run(directory, self._stop)))
            finally:
                with suppress(OSError):  # a full disk, which the run itself has reported
                    log.close()
        return run_ids

    def queued(self) -> Collection[str]:
        """Return nothing: what this process ran ended with it."""
        return ()

    def adopt(self, run_ids: Sequence[str]) -> None:
        """Refuse: a run in another process cannot be watched from this one."""
        if run_ids:
            run_dir = self._runs[run_ids[0]]
            raise LaunchError(
                f"{run_dir}: {run_ids[0]} is running in another process; wait for it, or stop it"
            )

    def poll(self, timeout_s: float) -> Sequence[Ended]:
        """Return the runs that ended; without any, wait for `wake` or the timeout."""
        self._stop.wait(0 if self._ended else timeout_s)
        ends, self._ended = self._ended, []
        return ends

    def wake(self) -> None:
        """Stop the worker inside `submit` at its next step."""
        self._stop.set()

    def cancel(self, run_ids: Sequence[str], *, now: bool) -> None:
        """Stop the run at its next step boundary."""
        del run_ids, now
        self._stop.set()
