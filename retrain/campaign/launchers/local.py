"""Workers as processes on this machine, each in a session of its own, on the GPU with the fewest workers.

A thread per worker blocks in the kernel until the worker ends, so ends are noticed at once and waiting uses
no CPU. Output goes straight to the run's output.log: no pipe can fill.

GPUs are shared over all campaigns of this user on this machine. A slot of a GPU is a locked file whose
descriptor the worker inherits. The kernel frees it when the worker's last process ends, so nothing has to be
released, and a restarted launcher finds used slots locked. With more workers than GPUs, workers share them.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from retrain.base.errors import ConfigError, LaunchError, RecordsError
from retrain.base.line_process import kill_group
from retrain.base.locks import (
    Descriptor,
    LockFile,
    LockHolder,
    holder,
    is_held,
    proven_holder,
    signal_holder,
    signal_process,
)
from retrain.campaign.launchers import Assignment, Ended
from retrain.config.keys import Tables
from retrain.records.files import open_log, readable
from retrain.records.layout import RunFiles, own_temporary_folder

VISIBLE = "CUDA_VISIBLE_DEVICES"
LEASE_POLL_S = 1.0  # how often a lease is checked, which cannot be waited on


def open_launcher(assignment: Assignment) -> LocalLauncher:
    """Return a launcher of local processes."""
    return LocalLauncher(assignment)


def runs_here(options: Tables) -> bool:
    """Return True."""
    del options
    return True


class LocalLauncher:
    """Starts workers as child processes."""

    queues = False

    def __init__(self, assignment: Assignment) -> None:
        self._runs = assignment.runs
        self._where = assignment.where
        self._say = assignment.say
        self._gpu_runs = assignment.gpu_runs
        self._gpus: list[str] = []
        if assignment.gpu_runs:
            from retrain.control.machine.nvidia import gpu_count  # not at the top: few runs need a GPU

            # read once: a worker's share must not depend on when it is started
            self._gpus = visible_gpus(os.environ.get(VISIBLE), gpu_count())
        self._ended: queue.SimpleQueue[Ended | None] = queue.SimpleQueue()
        self._workers: dict[str, Child | Adopted] = {}

    def submit(self, run_ids: Sequence[str]) -> Collection[str]:
        for run_id in run_ids:
            slot = take_slot(self._gpus, count=self._gpu_runs.get(run_id, 0))
            try:
                worker = Child(self._runs[run_id], self._where, slot)
            finally:
                slot.close()  # the worker has it now
            try:
                self._watch(run_id, worker)
            except LaunchError:
                worker.signal(signal.SIGKILL)
                worker.wait()
                raise
        return run_ids

    def queued(self) -> Collection[str]:
        """Return nothing: a live worker holds its run's lock."""
        return ()

    def adopt(self, run_ids: Sequence[str]) -> None:
        """Watch workers that are not our children, by the locks that they hold."""
        for run_id in run_ids:
            self._watch(run_id, Adopted(RunFiles(self._runs[run_id]).lock))

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
            numbers = (signal.SIGKILL,) if now else (signal.SIGTERM, signal.SIGCONT)
            lock = RunFiles(self._runs[run_id]).lock
            is_reached = any([self._workers[run_id].signal(number) for number in numbers])
            if is_reached or not readable(is_held, lock):
                continue
            named = holder(lock)
            if named is None or named.is_here:  # one elsewhere was named before
                self._say(
                    f"{run_id}: not signalled: the process that holds {lock} is not yours or not the one "
                    f"that it names ({named or 'none'}); end that process"
                )

    def _watch(self, run_id: str, worker: Child | Adopted) -> None:
        def notice() -> None:
            self._ended.put(Ended(run_id, worker.wait()))

        self._workers[run_id] = worker
        try:
            threading.Thread(target=notice, name=f"watch {run_id}", daemon=True).start()
        except RuntimeError as error:  # a limit of processes, or of memory
            where = self._runs[run_id]
            raise LaunchError(f"{where}: no thread can be started for its worker ({error})") from error


class Child:
    """A worker that we started."""

    def __init__(self, run_dir: Path, where: Path, slot: GpuSlot) -> None:
        log = open_log(RunFiles(run_dir).output_log)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "retrain.trainer.worker", str(run_dir.absolute())],
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

    def signal(self, number: int) -> bool:
        if self._process.poll() is None:  # not reaped yet, so the pid is still this process's
            if number == signal.SIGKILL:
                kill_group(self._process.pid)  # and whatever it started
            else:
                self._process.send_signal(number)
        return True

    def wait(self) -> int:
        return self._process.wait()


class Adopted:
    """A worker that is not our child, known by its run's lock."""

    def __init__(self, lock: Path) -> None:
        self._lock = lock
        self._holder: LockHolder | None = None  # while the lock cannot be read for now
        with contextlib.suppress(RecordsError):  # said when it is signalled
            self._holder = proven_holder(lock)

    def signal(self, number: int) -> bool:
        try:
            return signal_holder(self._lock, number)
        except RecordsError:
            if self._holder is None:
                raise
            return signal_process(self._holder, number)

    def wait(self) -> None:
        # nothing to wait for if the lock cannot be opened
        with contextlib.suppress(OSError, RecordsError):
            while True:
                with contextlib.closing(LockFile(str(self._lock), read_only=True)) as file:
                    file.lock(shared=True)
                if not is_held(self._lock):
                    return
                time.sleep(LEASE_POLL_S)  # held by a lease on another machine, whose lock does not show here


@dataclass(frozen=True, slots=True)
class GpuSlot:
    """A share of some GPUs, ours while its locks are open."""

    environment: Mapping[str, str]  # to add to the worker's
    locks: Sequence[LockFile] = ()  # whose descriptors the worker inherits

    @property
    def descriptors(self) -> tuple[int, ...]:
        return tuple(lock.fileno() for lock in self.locks)

    def close(self) -> None:
        """Close our descriptors; the worker that inherited the slot keeps it locked."""
        for lock in self.locks:
            Descriptor.close(lock)  # `LockFile.close` would unlock it for the worker as well


def visible_gpus(setting: str | None, count: int) -> list[str]:
    """Return GPUs as CUDA names them: CUDA_VISIBLE_DEVICES up to a negative one, else all."""
    if setting is None:
        return [str(number) for number in range(count)]
    gpus: list[str] = []
    for entry in (part.strip() for part in setting.split(",")):
        if not entry or entry.startswith("-"):
            break
        gpus.append(entry)
    return list(dict.fromkeys(gpus))


def take_slot(
    gpus: Sequence[str], directory: Path | None = None, uuids: Sequence[str] | None = None, count: int = 1
) -> GpuSlot:
    """Return a slot of the `count` least used of GPUs named as by `visible_gpus`; an empty one without GPUs.

    If there are not so many, it has all.

    The locks lie in `directory`, by default one per user of this machine. By `uuids`, by default the
    driver's, each GPU counts once whatever its name. Raises LaunchError if the directory cannot be used.
    """
    if not gpus or not count:
        return GpuSlot({})
    from retrain.control.machine.nvidia import gpu_uuids, visible  # nor this

    uuids = gpu_uuids() if uuids is None else uuids
    numbered = {gpu: next(iter(visible(uuids, gpu)), gpu) for gpu in gpus}  # however each is written
    full = {gpu: uuids[name] if isinstance(name, int) else name for gpu, name in numbered.items()}
    names: dict[str, str] = {}  # of the locks: GPUs
    for gpu, name in full.items():
        names.setdefault(re.sub(r"[^A-Za-z0-9-]", "_", name), gpu)
    taken: dict[str, LockFile] = {}
    try:
        directory = directory or own_temporary_folder("gpus")
        round_ = 0
        while len(taken) < min(count, len(names)):  # ends: every round tries locks that fewer workers hold
            for name in [each for each in names if each not in taken]:
                lock = LockFile(str(directory / f"{name}.{round_}.lock"))
                if len(taken) < count and lock.try_lock():
                    taken[name] = lock
                else:
                    lock.close()
            round_ += 1
        return GpuSlot({VISIBLE: ",".join(names[name] for name in names if name in taken)}, [*taken.values()])
    except (OSError, RecordsError, ConfigError) as error:
        for lock in taken.values():
            lock.close()
        raise LaunchError(f"cannot reserve a GPU: {error}") from error
