"""Draws conclusions from benchmarks: measurements, recommended values, and the wall time with them."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from retrain.base.errors import ConfigError
from retrain.campaign.admission import free_memory
from retrain.campaign.calibrate import advice, benchmarks
from retrain.campaign.calibrate.advice import Advice, Memory
from retrain.campaign.calibrate.benchmarks import (
    BatchFound,
    BenchmarkResult,
    Lengths,
    StepSplit,
    WorkerThroughput,
)
from retrain.config.keys import Tables
from retrain.control.machine import memory_available_bytes
from retrain.control.machine.nvidia import known_gpus
from retrain.plan.estimate.devices import DeviceSplits, device_splits
from retrain.plan.estimate.history import History, RunTimes, of_runs
from retrain.plan.estimate.wall_time import WallTime, learned_for, wall_time
from retrain.plan.estimate.workload import ALONE, Crowding
from retrain.plan.matrix import Plan


@dataclass(frozen=True)
class WorkerScaling:
    """Throughput across workers, and the Universal Scalability Law fitted to it."""

    measured: tuple[WorkerThroughput, ...]
    sigma: float | None
    kappa: float | None
    p_star: float | None  # None: no optimum found
    note: str  # why nothing was fitted, or a caveat


@dataclass(frozen=True)
class Disk:
    """Bytes that the whole campaign would write, and free bytes."""

    checkpoints: float
    records: float
    free: int


@dataclass(frozen=True)
class Calibration:
    """The result of a calibration: plain data, shown as tables or printed as JSON."""

    source: str
    directory: str  # of the benchmarks
    pilot: str  # directory of its campaign; "" if it did not begin
    is_complete: bool  # False: interrupted, or out of time
    was_interrupted: bool
    tried: tuple[str, ...]
    left_out: tuple[str, ...]
    seconds: float
    steps_taken: int  # by all runs of all benchmarks
    cost_usd: float | None  # of all benchmarks; None if no price is known
    steps: tuple[StepSplit, ...]
    lengths: tuple[Lengths, ...]  # of each condition
    batch: BatchFound | None
    scaling: WorkerScaling | None
    memory: Memory
    out_of_memory_at: int | None  # prompts at a time that did not fit the pilot's device
    disk: Disk | None
    devices: DeviceSplits | None  # ways to share them among runs; None if only one number was measured
    advice: tuple[Advice, ...]
    before: WallTime | None
    after: WallTime | None
    written: str = ""


@dataclass(frozen=True)
class Evidence:
    """All benchmarks of one plan, and what they measured."""

    plan: Plan
    tables: Tables  # of the file
    longest_answers: Mapping[str, int]  # characters, by condition
    done: Mapping[str, BenchmarkResult]  # by benchmark
    cores: float
    plan_of: Callable[[Tables], Plan]  # raises ConfigError

    def conclusion(
        self, source: str, directory: Path, left_out: Sequence[str], *, was_interrupted: bool
    ) -> Calibration:
        """Return what the benchmarks in a directory found for the file `source`."""
        advised, refused = self.advised()
        before, after = self.times(advised)
        pilot = self.pilot
        costs = [result.cost_usd for result in self.done.values() if result.cost_usd is not None]
        return Calibration(
            source=source,
            directory=str(directory),
            pilot=str(pilot.directory) if pilot else "",
            is_complete=not was_interrupted and not left_out,
            was_interrupted=was_interrupted,
            tried=tuple(self.done),
            left_out=(*left_out, *refused),
            seconds=sum(benchmark.seconds for benchmark in self.done.values()),
            steps_taken=sum(len(rows) for benchmark in self.done.values() for rows in benchmark.rows),
            cost_usd=sum(costs) if costs else None,
            steps=tuple(self.steps),
            lengths=tuple(self.lengths),
            batch=self.batch,
            scaling=self.scaling,
            memory=self.memory,
            out_of_memory_at=benchmarks.out_of_memory_at(pilot) if pilot else None,
            disk=self.disk(),
            devices=self.devices(before),
            advice=tuple(advised),
            before=before,
            after=after,
        )

    @property
    def pilot(self) -> BenchmarkResult | None:
        return self.done.get("pilot")

    @property
    def runs(self) -> list[RunTimes]:  # of the pilot, that completed two steps
        return self.pilot.measured if self.pilot else []

    @cached_property
    def steps(self) -> list[StepSplit]:
        return list(benchmarks.step_splits(self.runs))

    @cached_property
    def lengths(self) -> list[Lengths]:
        if self.pilot is None:
            return []
        alone = {c for c, run in self.plan.first_runs.items() if run.answers_alone}
        enough = {c: longest + 1 for c, longest in self.longest_answers.items() if longest and c in alone}
        return benchmarks.lengths(self.pilot, enough)  # one token more: the end

    @cached_property
    def side(self) -> list[WorkerThroughput]:
        return benchmarks.side_by_side(self.done)

    @cached_property
    def memory(self) -> Memory:
        """Return the memory of the largest worker, and what is free while none runs."""
        heaviest = max((benchmark.worker_bytes for benchmark in self.done.values()), default=0)
        on_gpus = max((benchmark.worker_gpu_bytes for benchmark in self.done.values()), default=0)
        free = sum(gpu.memory_free_bytes for gpu in known_gpus())
        return Memory(heaviest, memory_available_bytes(), on_gpus, free)

    @cached_property
    def batch(self) -> BatchFound | None:
        """Return what back pressure found: in its own benchmark, or in the pilot if the file enables it."""
        is_enabled = self.plan.runs[0].config.backpressure.enabled
        benchmark = self.done.get("batch") or (self.pilot if is_enabled else None)
        return benchmarks.batch_found(benchmark) if benchmark else None

    @cached_property
    def scaling(self) -> WorkerScaling | None:
        if not self.side:
            return None
        side, fit = tuple(self.side), advice.scaling_of(self.side)
        if fit is None or not fit.identified:
            few = f"fewer than {benchmarks.POINTS_FOR_A_LAW} worker counts measured: no law was fitted"
            return WorkerScaling(side, None, None, None, fit.reason if fit else few)
        star = fit.p_star if fit.p_star < float("inf") else None
        return WorkerScaling(side, fit.sigma, fit.kappa, star, fit.reason)

    def disk(self) -> Disk | None:
        if self.pilot is None:
            return None
        saved, logged = benchmarks.disk_bytes(self.pilot)
        kept = self.plan.runs[0].config.training.keep_checkpoints
        free = shutil.disk_usage(Path(self.plan.log_dir)).free
        return Disk(saved * kept * len(self.plan.runs), logged * self.plan.total_steps, free)

    def advised(self) -> tuple[list[Advice], list[str]]:
        """Return the recommendations that leave the file valid, and why others were dropped."""
        kept: list[Advice] = []
        refused: list[str] = []
        for candidate in self._advice():
            try:
                self.plan_of(advice.calibrated(self.tables, [*kept, candidate]))
            except ConfigError as error:
                refused.append(f"{candidate.key} = {candidate.value}: {error.problems[0]}")
            else:
                kept.append(candidate)
        return kept, refused

    def times(self, advised: Sequence[Advice]) -> tuple[WallTime | None, WallTime | None]:
        """Estimate the wall time of the campaign as it is and as advised."""
        longer = max((one.longer for one in advised), default=0.0)
        changed = self.plan_of(advice.calibrated(self.tables, advised))
        before, after = self._forecast.of(self.plan), self._forecast.of(changed, longer)
        if after is not None and longer:
            note = f"assumes steps {longer:.0%} longer, the most that a higher max_tokens can cost"
            after = replace(after, notes=(note, *after.notes))
        return before, after

    def devices(self, before: WallTime | None) -> DeviceSplits | None:
        """Compare ways to share the devices, by the runs on different numbers of them."""
        results = [result for name, result in self.done.items() if name.startswith("devices-")]
        history = of_runs([run for result in results for run in result.measured])
        p50_s = before.p50_s if before else None
        return device_splits(self.plan, history, self.cores, p50_s, free_memory) if history.runs else None

    @cached_property
    def crowding(self) -> Crowding | None:
        """Return the slowdown among concurrent workers; None if it was not measured."""
        return crowding_between(self.side, self.plan.room(self.cores))

    @cached_property
    def _forecast(self) -> Forecast:
        return Forecast(of_runs(self.runs), self.side, self.cores)

    def _advice(self) -> Iterator[Advice]:
        first = self.plan.runs[0].config
        yield from self._max_tokens()
        count = self.plan.workers
        is_remote = any(run.takes_permits for run in self.plan.first_runs.values())
        permit_wait = None  # as a fraction of a step; None also if permits are not scarce
        if benchmarks.are_permits_short(first.backend, self.runs, count):
            if self.side:
                permit_wait = min(self.side, key=lambda m: abs(m.workers - count)).permit_wait_fraction
            elif self.runs:
                permit_wait = benchmarks.permit_wait_fraction(self.runs)
        is_unreported = any(run.permits_adapt is False for run in self.runs)
        permits = list(advice.max_concurrent(self.plan, permit_wait, is_remote, is_unreported))
        makespans_s = self._forecast.by_workers(self.plan_of(advice.calibrated(self.tables, permits)))
        for recommended in advice.max_workers(self.plan, self.side, self.memory, makespans_s):
            count = int(str(recommended.value)) if recommended.key == "campaign.max_workers" else count
            yield recommended
        yield from permits
        yield from advice.stagger(self.plan, self.steps, is_remote, count)
        if self.batch is not None and self.batch.is_conclusive:
            follows = first.backpressure.enabled and first.backpressure.control == "batch"
            yield advice.batch_size(first.training.batch_size, self.batch, follows)
        speed = benchmarks.batches_per_unit(self.done["limiter"]) if "limiter" in self.done else None
        if speed is not None:
            yield advice.limiter_speed(first.rate_limiter, first.training.batch_size, speed)

    def _max_tokens(self) -> Iterator[Advice]:
        """Judge the common value by the conditions that use it, and each condition's own value by itself."""
        tables = self.tables.get("campaign", {}).get("conditions") or [{}]
        special = {
            label
            for label, table in zip(self.plan.conditions, tables, strict=True)
            if "max_tokens" in table.get("training", {})
        }
        common = [lengths for lengths in self.lengths if lengths.condition not in special]
        if common:
            yield advice.max_tokens("training.max_tokens", advice.worst_of(common), self.steps)
        for lengths in self.lengths:
            if lengths.condition in special:
                name = f"{lengths.condition}: training.max_tokens"
                yield replace(advice.max_tokens(name, lengths, self.steps), is_written=False, longer=0.0)


@dataclass(frozen=True)
class Forecast:
    """Estimates plans from a pilot, with the slowdown that was measured among concurrent workers."""

    history: History  # of the pilot
    side: Sequence[WorkerThroughput]
    cores: float  # of this machine

    def of(self, plan: Plan, longer: float = 0.0) -> WallTime | None:
        """Return the wall time of a plan whose steps take longer by a fraction; None if no time is known."""
        history = replace(self.history, runs=tuple(run.slowed(1 + longer) for run in self.history.runs))
        crowding = crowding_between(self.side, plan.room(self.cores))
        learned = learned_for(plan, history, self.cores, crowding)
        return wall_time(plan, learned, self.cores) if learned else None

    def by_workers(self, plan: Plan) -> Mapping[int, float]:
        """Return P50 in seconds for each number of workers up to the most tried, and for the plan's own.

        Where each worker keeps a core busy, more workers than cores are not considered.
        """
        room = plan.room(self.cores)
        most = min(len(plan.runs), max(1, int(room)) if room else len(plan.runs))
        tried = max((m.workers for m in self.side), default=0)
        counts = {*range(1, min(tried, most) + 1), plan.workers}
        campaigns = {n: replace(plan.campaign, parallel=True, max_workers=n) for n in sorted(counts)}
        times = {n: self.of(replace(plan, campaign=campaign)) for n, campaign in campaigns.items()}
        return {n: time.p50_s for n, time in times.items() if time is not None}


def crowding_between(side: Sequence[WorkerThroughput], shared_cores: float) -> Crowding | None:
    """Return how many times longer a step takes among others; None if that was not measured.

    Waits for permits are excluded: the estimate simulates them. `shared_cores` are those that all workers
    share, each keeping one busy; 0 if they share none.
    """
    pace = {
        m.workers: m.workers * (1 - m.permit_wait_fraction) / m.tokens_per_second
        for m in sorted(side, key=lambda m: m.workers)
        if m.tokens_per_second
    }
    if len(pace) < 2:
        return None if shared_cores else ALONE
    first = pace[min(pace)]
    times = itertools.accumulate((one / first for one in pace.values()), max)  # more workers speed up no step
    points = [(float(count), times_as_long) for count, times_as_long in zip(pace, times, strict=True)]
    if points[-1][0] < shared_cores:
        points.append((shared_cores, points[-1][1]))
    return Crowding(tuple(points), is_full=shared_cores > 0)
