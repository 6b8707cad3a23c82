"""The short campaigns that a calibration consists of: their tables, from those of the user, and results."""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from retrain.campaign.orchestrate import Campaign
from retrain.config.keys import Tables
from retrain.config.resolve import merge, overrides_of, with_default_plugins
from retrain.config.schema import BackPressureSection, TrainingSection
from retrain.control.machine import own_memory_bytes, process_tree
from retrain.control.machine.nvidia import Gpu, known_gpus
from retrain.plan.estimate.history import RunTimes, read_run_times
from retrain.plan.matrix import Plan
from retrain.records.files import readable
from retrain.records.layout import RunFiles
from retrain.records.lines import Row
from retrain.records.metrics import read_metrics
from retrain.records.spending import Spending, read_spending
from retrain.records.text import count_of

Rows = Sequence[Row]
SERVICES = ("loggers", "logger_params")  # they are for the user's results, not for benchmarks
LAST_SAVE_S = 20.0  # for workers to exit after the budget is used up; then they are killed
WATCH_EVERY_S = 0.25
POINTS_FOR_A_LAW = 4  # numbers of workers; with three coefficients, a misfit shows from four points


@dataclass(frozen=True)
class Benchmark:
    """One short campaign."""

    name: str  # pilot, workers-4, batch, limiter
    what: str  # for people
    runs: int
    steps: int  # of each run
    tables: Tables


@dataclass(frozen=True)
class BenchmarkResult:
    """The result of a benchmark."""

    plan: Plan
    directory: Path
    runs: tuple[Path, ...]  # of every run that was planned
    seconds: float
    worker_bytes: int  # memory of the largest worker; 0 if none was seen
    worker_gpu_bytes: int = 0  # the same over all GPUs; also 0 if the driver lists no processes

    @cached_property
    def rows(self) -> list[Rows]:
        """The steps of every run; none of a run whose records cannot be read."""
        return [readable(read_metrics, directory) or [] for directory in self.runs]

    @cached_property
    def spent(self) -> list[Spending]:
        """What each run was billed; none of a run whose records cannot be read."""
        spendings = (readable(read_spending, RunFiles(directory)) for directory in self.runs)
        return [spending for spending in spendings if spending is not None]

    @property
    def cost_usd(self) -> float | None:
        """What all runs cost at most; None if no price is known."""
        costs = [spending.at_most_usd for spending in self.spent if spending.at_most_usd is not None]
        return math.fsum(costs) if costs else None

    @cached_property
    def measured(self) -> list[RunTimes]:
        """The times of every run; runs without two whole steps are left out."""
        return [run for path in self.runs if (run := readable(read_run_times, path)) is not None]


@dataclass(frozen=True)
class Effort:
    """Sizes of the benchmarks."""

    seeds: int = 1  # of the pilot, each condition
    steps: int = 30  # of a pilot's run
    probe_steps: int = 10  # of each concurrent run, at least
    probe_s: float = 4.0  # the same in seconds, so that starting one by one hardly counts
    batch_steps: int = 40  # of the batch size search
    most_workers: int = 16  # at a time


def pilot(tables: Tables, effort: Effort, conditions: int, log_dir: Path) -> Benchmark:
    """Return the benchmark that runs every condition for a few steps, launched as the campaign would be."""
    changed = _short(tables, effort.steps, log_dir)
    campaign = changed["campaign"]
    seeds = campaign.get("seeds") or [max(0, changed.get("training", {}).get("seed", 0))]
    campaign["seeds"] = seeds[: effort.seeds]
    runs = conditions * len(campaign["seeds"])
    what = f"each condition, {count_of(len(campaign['seeds']), 'seed')}"
    return Benchmark("pilot", what, runs, effort.steps, changed)


def worker_counts(configured: int, cores: float, runs: int, most: int) -> list[int]:
    """Return the worker counts to try: 1, 2, 4, ... beyond those configured and twice the cores."""
    highest = min(max(configured, round(2 * cores), 2), runs, most)
    doubled = {1 << power for power in range(highest.bit_length())}
    tried = {n for n in doubled if n <= highest} | {min(configured, highest)}
    if len(tried) < POINTS_FOR_A_LAW <= highest:
        tried.add(3)
    return sorted(tried)


def concurrent(
    tables: Tables, condition: int, workers: int, steps: int, log_dir: Path, least_s: float = 0.0
) -> Benchmark:
    """Return the benchmark of concurrent runs of one condition, whose `steps` take at least `least_s`."""
    campaign = {"seeds": list(range(workers)), "parallel": True, "max_workers": workers, "stagger_seconds": 0}
    overrides = {
        "campaign": campaign,
        "training": {"save_every": 0, "eval_every": 0},
        "data": {"eval_prompts": 1},
    }
    span = f", {least_s:g} s or more" if least_s else ""
    changed = merge(_alone(tables, steps, log_dir, condition), overrides)
    return Benchmark(f"workers-{workers}", f"{workers} at a time{span}", workers, steps, changed)


def seeking_batch(tables: Tables, condition: int, steps: int, log_dir: Path) -> Benchmark:
    """Return the benchmark of one run whose batch size back pressure chooses."""
    changed = _alone(tables, steps, log_dir, condition)
    batch = changed.get("training", {}).get("batch_size", TrainingSection.batch_size)
    bounds = changed.get("backpressure", {})
    overrides = {
        "enabled": True,
        "control": "batch",
        "objective": "throughput",
        "max_batch_size": max(bounds.get("max_batch_size", BackPressureSection.max_batch_size), batch),
        "min_batch_size": min(bounds.get("min_batch_size", BackPressureSection.min_batch_size), batch),
    }
    changed = merge(changed, {"campaign": {"seeds": [0]}, "backpressure": overrides}) | {"rate_limiter": {}}
    return Benchmark("batch", "back pressure over batch sizes", 1, steps, changed)


def unlimited(tables: Tables, condition: int, steps: int, log_dir: Path) -> Benchmark:
    """Return the benchmark of one run whose sampling is not limited."""
    overrides = {"campaign": {"seeds": [0]}, "rate_limiter": {"rate_limit_speed_batch_per_sim": 0}}
    changed = merge(_alone(tables, steps, log_dir, condition), overrides)
    changed["rate_limiter"].setdefault("max_staleness", 1)  # as with the speed that was given
    return Benchmark("limiter", "asynchronous sampling, unlimited", 1, steps, changed)


def _short(tables: Tables, steps: int, log_dir: Path) -> dict[str, Any]:
    changed = deepcopy(dict(tables))
    changed["campaign"] = {
        **changed.get("campaign", {}),
        "max_steps": steps,
        "retries": 0,
        "pause_after": 0,
        "on_failure": "continue",  # other conditions are still measured
    }
    changed.pop("decision", None)  # benchmarks measure, and run the seeds that they name
    changed["campaign"].pop("search", None)
    changed["campaign"].pop("name", None)  # directories are named after their benchmarks
    logging = {key: value for key, value in changed.get("logging", {}).items() if key not in SERVICES}
    changed["logging"] = {**logging, "log_dir": str(log_dir)}
    for table in (changed, *(changed["campaign"].get("conditions") or ())):
        if "warmup" in table:
            table["warmup"] = {}  # not part of what is sized
        if "training" in table:
            table["training"].pop("max_steps", None)
    return changed


def _alone(tables: Tables, steps: int, log_dir: Path, condition: int) -> dict[str, Any]:
    """Return tables of one condition, whose own settings are merged: they would override the benchmark's."""
    changed = _short(tables, steps, log_dir)
    campaign = changed["campaign"]
    if not campaign.get("conditions"):
        return changed
    alone_table = campaign["conditions"][condition]
    alone = {**campaign, "conditions": [{"name": alone_table.get("name", "")}]}
    return {**changed, **merge(with_default_plugins(changed), overrides_of(alone_table)), "campaign": alone}


@contextmanager
def stopped_after(seconds: float, campaign: Campaign) -> Iterator[None]:
    """Stop a campaign once time is up: gently, and firmly if it has not ended some seconds later."""
    seconds = min(seconds, threading.TIMEOUT_MAX - LAST_SAVE_S)  # about 292 years
    gently = threading.Timer(seconds, campaign.stop)
    firmly = threading.Timer(seconds + LAST_SAVE_S, lambda: campaign.stop(now=True))
    for timer in (gently, firmly):
        timer.daemon = True
        timer.start()
    try:
        yield
    finally:
        gently.cancel()
        firmly.cancel()


class WorkerMemory:
    """Watches the memory of our workers while it is open: the peak of the largest one, in bytes."""

    def __init__(self) -> None:
        self.most = self.most_on_gpus = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> WorkerMemory:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(WATCH_EVERY_S):
            workers = process_tree(os.getpid()) - {os.getpid()}
            for worker in workers:
                self.most = max(self.most, own_memory_bytes([worker]))
            self.most_on_gpus = max(self.most_on_gpus, heaviest_on(known_gpus(), workers))


def heaviest_on(found: Iterable[Gpu], workers: Collection[int]) -> int:
    """Return the GPU memory in bytes of the process that holds most, over all GPUs."""
    held: Counter[int] = Counter()
    for gpu in found:
        held.update({pid: size for pid, size in gpu.process_memory_bytes.items() if pid in workers})
    return max(held.values(), default=0)
