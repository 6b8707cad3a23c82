"""Runs trials one after another, within a time budget, and watches the memory of their workers.

A trial that is stopped, by the user or because time is up, is kept up to there.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from retrain.calibrate.trials import Trial
from retrain.campaign.events import Observer
from retrain.campaign.orchestrate import CampaignRun
from retrain.campaign.run import start
from retrain.errors import InfrastructureError
from retrain.plan.matrix import Plan
from retrain.system import Gpu, gpus
from retrain.system.processes import own_memory_bytes, process_tree

LAST_SAVE_S = 20.0  # for workers to exit after the budget is used up; then they are killed
WATCH_EVERY_S = 0.25


@dataclass(frozen=True)
class Trialled:
    """The result of a trial."""

    trial: Trial
    plan: Plan
    directory: Path
    runs: tuple[Path, ...]  # of every run that was planned
    seconds: float
    worker_bytes: int  # memory of the largest worker; 0 if none was seen
    worker_gpu_bytes: int = 0  # the same over all GPUs; also 0 if the driver lists no processes


class Session:
    """Runs the trials of one calibration. `interrupt` may be called from a signal handler."""

    def __init__(
        self, directory: Path, budget_s: float, observe: Callable[[], Observer], beside: Path | None = None
    ) -> None:
        self._directory = directory
        self._beside = beside  # the directory of the user's file, where dotted paths are looked for
        self._ends_at = time.monotonic() + budget_s
        self._observe = observe
        self._current: CampaignRun | None = None
        self.interrupted = False

    @property
    def left_s(self) -> float:
        """Seconds left of the budget."""
        return max(0.0, self._ends_at - time.monotonic())

    @property
    def is_over(self) -> bool:
        """Whether no further trial should begin."""
        return self.interrupted or self.left_s == 0

    def interrupt(self, *, now: bool = False) -> None:
        """Stop the current trial, and start no other."""
        self.interrupted = True
        if self._current is not None:
            self._current.stop(now=now)

    def run(self, trial: Trial) -> Trialled:
        """Run one trial until it ends or the budget is used up.

        Raises:
            ConfigError: the trial's file is not valid.
            LaunchError: nothing could be started.
        """
        path = self._directory / f"{trial.name}.toml"
        path.write_text(tomli_w.dumps(trial.tables), encoding="utf-8")
        campaign = self._current = start(path, (), self._observe(), beside=self._beside)
        began = time.monotonic()
        try:
            with self._stopped_in_time(campaign), _watched_memory() as memory:
                if not self.interrupted:
                    campaign.execute()
        finally:
            self._current = None
        runs = tuple(campaign.files_of(run.run_id).directory for run in campaign.plan.runs)
        took_s = time.monotonic() - began
        return Trialled(
            trial, campaign.plan, campaign.directory, runs, took_s, memory.most, memory.most_on_gpus
        )

    @contextmanager
    def _stopped_in_time(self, campaign: CampaignRun) -> Iterator[None]:
        gently = threading.Timer(self.left_s, campaign.stop)
        firmly = threading.Timer(self.left_s + LAST_SAVE_S, lambda: campaign.stop(now=True))
        for timer in (gently, firmly):
            timer.daemon = True
            timer.start()
        try:
            yield
        finally:
            gently.cancel()
            firmly.cancel()


class _Memory:
    """The peak memory of any of our workers."""

    def __init__(self) -> None:
        self.most = self.most_on_gpus = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(WATCH_EVERY_S):
            workers = process_tree(os.getpid()) - {os.getpid()}
            for worker in workers:
                self.most = max(self.most, own_memory_bytes([worker]))
            self.most_on_gpus = max(self.most_on_gpus, heaviest_on(read_gpus(), workers))


def heaviest_on(found: Iterable[Gpu], workers: Collection[int]) -> int:
    """Return the GPU memory in bytes of the process that holds most, over all GPUs."""
    held: Counter[int] = Counter()
    for gpu in found:
        held.update({pid: size for pid, size in gpu.process_memory_bytes.items() if pid in workers})
    return max(held.values(), default=0)


def read_gpus() -> list[Gpu]:
    """Return the GPUs; none if they cannot be read, because a calibration does not need them."""
    try:
        return gpus()
    except InfrastructureError:
        return []


@contextmanager
def _watched_memory() -> Iterator[_Memory]:
    memory = _Memory()
    try:
        yield memory
    finally:
        memory.close()
