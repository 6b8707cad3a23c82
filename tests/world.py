"""A launcher whose workers are objects: real locks, records and checkpoints, but steps only when told.

`poll` is where an orchestrator waits, so there it takes orders: each order is something that happens
in the world (a step, a death, a full disk), the last one the orchestrator's own end.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from retrain.base.errors import EXIT_DONE, EXIT_INFRASTRUCTURE, EXIT_INTERRUPTED, RecordsError
from retrain.base.locks import HeldLock, hold
from retrain.campaign.launchers import Assignment, Ended
from retrain.records.layout import RunFiles
from retrain.records.metrics import MetricsWriter
from retrain.records.run_state import begin_attempt, end_attempt, write_done
from retrain.trainer import checkpoint
from retrain.trainer.worker import read_run
from tests.full_disk import files_of_at_most

KILLED = -9
A_LITTLE = 7  # bytes that still fit on a disk that is full


class OrchestratorKilled(BaseException):
    """The orchestrator is gone; its workers are not."""


class Worker:
    """One attempt at a run that counts to its max_steps, saving every second step."""

    def __init__(self, run_dir: Path, lock: HeldLock) -> None:
        self.files = RunFiles(run_dir)
        self.config = read_run(self.files)
        self._lock = lock
        self.asked_to_leave = False
        found = checkpoint.newest(self.files.checkpoints)
        self.step = found.step if found else 0
        self.number = begin_attempt(self.files.attempts, resumed_from_step=self.step)
        self._rows = MetricsWriter(self.files.metrics, self.number)

    def take_step(self) -> int | None:
        """Take one step; gives the exit code if it was the last one."""
        try:
            if self.asked_to_leave:
                self._save()
                return self._end("interrupted", EXIT_INTERRUPTED)
            self._rows.append({"step": self.step + 1})
            self.step += 1
            if self.step % 2 == 0:
                self._save()
        except RecordsError:
            with suppress(RecordsError):
                end_attempt(self.files.attempts, self.number, "infrastructure")
            return self.vanish(EXIT_INFRASTRUCTURE)
        if self.step < self.config.training.max_steps:
            return None
        assert self.config.run is not None
        write_done(self.files.done, self.config.run.config_hash, {})
        return self._end("done", EXIT_DONE)

    def vanish(self, code: int) -> int:
        """End as the kernel ends a process."""
        self._rows.close()
        self._lock.release()
        return code

    def tear_a_row(self) -> None:
        """Be in the middle of a write."""
        with self.files.metrics.open("ab") as file:
            file.write(b'{"step": 9')

    def _save(self) -> None:
        self._rows.sync()
        checkpoint.save(
            self.files.checkpoints, self.step, {}, lambda at: (at / "weights").write_bytes(b"w"), keep=2
        )

    def _end(self, ending: str, code: int) -> int:
        end_attempt(self.files.attempts, self.number, ending, exit_code=code)
        return self.vanish(code)


class World:
    """What exists beside an orchestrator; a Launcher to it."""

    queues = False

    def __init__(self) -> None:
        self.directories: Mapping[str, Path] = {}
        self.alive: dict[str, Worker] = {}
        self.most_alive = 0
        self.started: list[str] = []
        self.ended_runs: list[Ended] = []
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._obeyed = threading.Semaphore(0)

    def queued(self) -> Collection[str]:
        return ()

    def submit(self, run_ids: Sequence[str]) -> Collection[str]:
        for run_id in run_ids:
            self._start(run_id, self.directories[run_id])
        return run_ids

    def _start(self, run_id: str, run_dir: Path) -> None:
        lock = hold(RunFiles(run_dir).lock)
        self.started.append(run_id)
        if lock is None:
            self.ended_runs.append(Ended(run_id, EXIT_INFRASTRUCTURE))
            return
        self.alive[run_id] = Worker(run_dir, lock)
        self.most_alive = max(self.most_alive, len(self.alive))

    def adopt(self, run_ids: Sequence[str]) -> None:
        """Its workers are in this very world."""

    def poll(self, timeout_s: float) -> Sequence[Ended]:
        """Wait for the next order once the last is carried out; return ends at once."""
        if not self.ended_runs and timeout_s > 0:
            self._obeyed.release()
            self._orders.get()()
        ends, self.ended_runs = self.ended_runs, []
        return ends

    def wake(self) -> None:
        pass

    def cancel(self, run_ids: Sequence[str], *, now: bool) -> None:
        for run_id in run_ids:
            if run_id in self.alive:
                if now:
                    self.kill(run_id)
                else:
                    self.alive[run_id].asked_to_leave = True

    def order(self, what: Callable[[], None]) -> None:
        """Have something happen, and wait until the orchestrator waits again (or is gone)."""
        self._orders.put(what)
        self._obeyed.acquire()

    def await_orchestrator(self) -> None:
        self._obeyed.acquire()

    def orchestrator_left(self) -> None:
        self._obeyed.release()

    # What can happen

    def step(self, run_id: str) -> None:
        self._settle(run_id, self.alive[run_id].take_step())

    def kill(self, run_id: str, *, while_writing: bool = False) -> None:
        worker = self.alive[run_id]
        if while_writing:
            worker.tear_a_row()
        self._settle(run_id, worker.vanish(KILLED))

    def step_on_a_full_disk(self, run_id: str) -> None:
        worker = self.alive[run_id]
        size = worker.files.metrics.stat().st_size
        with files_of_at_most(size + A_LITTLE):
            code = worker.take_step()
        self._settle(run_id, code)

    def kill_orchestrator(self) -> None:
        raise OrchestratorKilled

    def _settle(self, run_id: str, code: int | None) -> None:
        if code is not None:
            del self.alive[run_id]
            self.ended_runs.append(Ended(run_id, code))


WORLDS: list[World] = []


def open_launcher(assignment: Assignment) -> World:
    """Return the orchestrator the world that the test made last."""
    WORLDS[-1].directories = assignment.runs
    return WORLDS[-1]
