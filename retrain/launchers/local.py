"""Workers as processes on this machine, each in a session of its own.

A thread per worker blocks in the kernel until the worker ends, so ends are noticed at once and waiting uses
no CPU. Output goes straight to the run's output.log: no pipe can fill.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from retrain.errors import LaunchError, RecordsError
from retrain.launchers import Assignment, Ended
from retrain.launchers.gpu_slots import VISIBLE, GpuSlot, take_slot, visible_gpus
from retrain.locks.held import is_held, signal_holder
from retrain.records.files import open_log
from retrain.records.layout import RunFiles
from retrain.system.nvidia import gpu_count

LEASE_LOOK_S = 1.0  # how often a lease is checked, which cannot be waited on


def open_launcher(assignment: Assignment) -> LocalLauncher:
    """Return a launcher of local processes."""
    return LocalLauncher(assignment)


class LocalLauncher:
    """Starts workers as child processes."""

    queues = False

    def __init__(self, assignment: Assignment) -> None:
        self._runs = assignment.runs
        self._where = assignment.where
        self._gpu_runs = assignment.gpu_runs
        # read once: a worker's share must not depend on when it is started
        self._gpus = visible_gpus(os.environ.get(VISIBLE), gpu_count()) if assignment.gpu_runs else []
        self._ended: queue.SimpleQueue[Ended | None] = queue.SimpleQueue()
        self._signal: dict[str, Callable[[int], object]] = {}

    def describe(self) -> str:
        shared = f", which share GPU {', '.join(self._gpus)}" if self._gpus else ""
        return f"processes on this machine{shared}"

    def room(self) -> int:
        """Return no limit: the supervisor decides."""
        return sys.maxsize

    def submit(self, run_ids: Sequence[str]) -> Collection[str]:
        for run_id in run_ids:
            slot = take_slot(self._gpus if run_id in self._gpu_runs else [])
            try:
                process = _spawn(self._runs[run_id], self._where, slot)
            finally:
                slot.close()  # the worker has it now
            self._watch(run_id, partial(_signal_group, process), process.wait)
        return run_ids

    def queued(self) -> Collection[str]:
        """Return nothing: a live worker holds its run's lock."""
        return ()

    def adopt(self, run_ids: Sequence[str]) -> None:
        """Watch workers that are not our children, by the locks that they hold."""
        for run_id in run_ids:
            lock = RunFiles(self._runs[run_id]).lock
            self._watch(run_id, partial(signal_holder, lock), partial(_wait_for_lock, lock))

    def poll(self, timeout_s: float) -> list[Ended]:
        ends: list[Ended] = []
        with contextlib.suppress(queue.Empty):
            ended = self._ended.get(timeout=timeout_s)
            while True:
                ends += [ended] if ended else []
                ended = self._ended.get_nowait()
        return ends

    def wake(self) -> None:
        self._ended.put(None)

    def cancel(self, run_ids: Sequence[str], *, now: bool) -> None:
        """Send SIGTERM, and SIGCONT for a suspended worker, or SIGKILL."""
        for run_id in run_ids:
            for number in (signal.SIGKILL,) if now else (signal.SIGTERM, signal.SIGCONT):
                self._signal[run_id](number)

    def _watch(self, run_id: str, signal_it: Callable[[int], object], wait: Callable[[], int | None]) -> None:
        def notice() -> None:
            self._ended.put(Ended(run_id, wait()))

        self._signal[run_id] = signal_it
        threading.Thread(target=notice, name=f"watch {run_id}", daemon=True).start()


def _spawn(run_dir: Path, where: Path, slot: GpuSlot) -> subprocess.Popen[bytes]:
    log = open_log(RunFiles(run_dir).output_log)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "retrain.worker", str(run_dir.absolute())],
            cwd=where,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # the terminal's Ctrl-C is for the orchestrator alone
            env={**os.environ, **slot.environment},
            pass_fds=slot.descriptors,
        )
    except OSError as error:
        what = error.filename or sys.executable  # the working directory, if it no longer exists
        raise LaunchError(f"{run_dir}: cannot start a worker ({what}: {error.strerror})") from error
    finally:
        os.close(log)


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    if process.poll() is None:  # not reaped yet, so the pid is still this process's
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(process.pid, number)  # and whatever it started
            else:
                process.send_signal(number)


def _wait_for_lock(lock: Path) -> None:
    # nothing to wait for if the lock cannot be opened
    with contextlib.suppress(OSError, RecordsError):
        while True:
            fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH)
            finally:
                os.close(fd)
            if not is_held(lock):
                return
            time.sleep(LEASE_LOOK_S)  # held by a lease on another machine, whose lock does not show here
