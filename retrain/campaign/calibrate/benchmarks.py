"""The short campaigns of a calibration: their tables, from those of the user, and what they measured."""

from __future__ import annotations

import math
import os
import statistics
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from retrain.base.clock import seconds_between
from retrain.campaign.orchestrate import Campaign
from retrain.config.keys import Tables
from retrain.config.resolve import merge, overrides_of, with_default_plugins
from retrain.config.schema import BackendSection, BackPressureSection, TrainingSection
from retrain.control.machine import own_memory_bytes, process_tree
from retrain.control.machine.nvidia import Gpu, known_gpus
from retrain.plan.estimate.history import RunTimes, read_run_times
from retrain.plan.matrix import Plan
from retrain.records.files import readable
from retrain.records.layout import RunFiles
from retrain.records.lines import Row, number_in
from retrain.records.metrics import read_metrics
from retrain.records.spending import Spending, read_spending
from retrain.records.text import count_of

Rows = Sequence[Row]
SERVICES = ("loggers", "logger_params", "mirror")  # they are for the user's results, not for benchmarks
LAST_SAVE_S = 20.0  # for workers to exit after the budget is used up; then they are killed
WATCH_EVERY_S = 0.25
POINTS_FOR_A_LAW = 4  # numbers of workers; with three coefficients, a misfit shows from four points
OUT_OF_MEMORY = "out of memory"  # in a controller's reason
STEADY_ROWS = 3  # minimum for a meaningful throughput: the first step is a warm-up


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
        "training": {"save_every": 0, "eval_every": 0, "eval_at_start": False},
        "data": {"eval_prompts": 1},
    }
    span = f", {least_s:g} s or more" if least_s else ""
    changed = merge(_alone(tables, steps, log_dir, condition), overrides)
    return Benchmark(f"workers-{workers}", f"{workers} at a time{span}", workers, steps, changed)


def on_devices(tables: Tables, condition: int, devices: int, steps: int, log_dir: Path) -> Benchmark:
    """Return the benchmark of one run of a condition on so many devices."""
    alone = concurrent(tables, condition, 1, steps, log_dir)
    changed = merge(alone.tables, {"backend": {"options": {"devices": devices}}})
    return replace(alone, name=f"devices-{devices}", what=f"one run on {devices}", tables=changed)


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
    for key in ("notify", "notify_url"):  # of the campaign that is measured for
        changed["campaign"].pop(key, None)
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
    conditions = changed["campaign"].get("conditions")
    if not conditions:
        return changed
    table = conditions[condition]
    alone = {**changed["campaign"], "conditions": [{"name": table.get("name", "")}]}
    return {**changed, **merge(with_default_plugins(changed), overrides_of(table)), "campaign": alone}


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


@dataclass(frozen=True)
class StepSplit:
    """How the mean step of a condition is spent, in seconds, waits for permits included."""

    condition: str
    steps: int
    median_s: float
    mean_s: float
    sampling_s: float
    scoring_s: float
    training_s: float
    permit_wait_s: float  # part of the others, summed over all calls: may exceed the step


@dataclass(frozen=True)
class Lengths:
    """How long one condition's completions were, in tokens; fractions of rollouts."""

    condition: str
    allowed: int  # max_tokens
    hit_fraction: float  # that reached it
    median: float
    p95: float
    longest: int
    late_hit_fraction: float  # that reached it in the last third of the steps
    has_signal: bool  # whether any completion got a reward, or more than another
    enough: int = 0  # tokens that no answer exceeds; 0 if a completion may hold more than the answer


@dataclass(frozen=True)
class WorkerThroughput:
    """What was measured with this number of concurrent workers."""

    workers: int
    tokens_per_second: float
    step_time_s: float  # median
    permit_wait_fraction: float = 0.0  # of their steps


@dataclass(frozen=True)
class BatchFound:
    """What back pressure found in one run."""

    regimes: tuple[str, ...]  # in order of first appearance
    p_star: float | None  # concurrency with the best throughput; None without an interior optimum
    concurrency: int  # that the file configures
    batch_size: int  # that it ended at
    reason: str

    @property
    def is_conclusive(self) -> bool:
        """Whether enough steps were counted to judge any batch size."""
        return set(self.regimes) != {"warmup"}


def step_splits(runs: Sequence[RunTimes]) -> Iterator[StepSplit]:
    """Iterate over the means of each condition's runs."""
    names = ("sampling_s", "scoring_s", "training_s", "permit_wait_s")
    for condition in dict.fromkeys(run.condition for run in runs):
        of_condition = [run for run in runs if run.condition == condition]
        times = [seconds for run in of_condition for seconds in run.whole_step_times_s]
        means = [statistics.fmean(getattr(run.parts, name) for run in of_condition) for name in names]
        yield StepSplit(condition, len(times), statistics.median(times), statistics.fmean(times), *means)


def permit_wait_fraction(runs: Sequence[RunTimes]) -> float:
    """Return the fraction of step time spent waiting for permits."""
    whole = math.fsum(seconds for run in runs for seconds in run.whole_step_times_s)
    alone = math.fsum(seconds for run in runs for seconds in run.step_times_s)
    return max(0.0, 1 - alone / whole) if whole else 0.0


def are_permits_short(backend: BackendSection, runs: Iterable[RunTimes], workers: int) -> bool:
    """Whether workers can ask for more permits than there are; otherwise a wait means a busy machine."""
    calls = max((run.parts.calls_at_once for run in runs), default=1)
    if backend.throttle_dir or backend.adapts_permits:
        return True
    spare = backend.first_permits - workers * calls
    return spare < 0 or (calls > 1 and spare == 0)  # calls are a mean: at times there are more


def lengths(benchmark: BenchmarkResult, enough: Mapping[str, int]) -> list[Lengths]:
    """Summarize each condition over all steps of its runs; those without lengths in their rows are left out.

    `enough` are tokens that no answer exceeds, of conditions whose completions are the answer and no more.
    """
    all_rows = [row for rows in benchmark.rows for row in rows if number_in(row, "length_max") is not None]
    measured = []
    for condition, run in benchmark.plan.first_runs.items():
        rows = [row for row in all_rows if row["condition"] == condition]
        if not rows:
            continue
        last = max(row["step"] for row in rows)
        late = [row for row in rows if row["step"] > 2 * last / 3]
        summary = Lengths(
            condition,
            allowed=run.config.training.max_tokens,
            hit_fraction=statistics.fmean(row["max_token_hit_rate"] for row in rows),
            median=statistics.median(row["length_p50"] for row in rows),
            p95=statistics.median(row["length_p95"] for row in rows),
            longest=int(max(row["length_max"] for row in rows)),
            late_hit_fraction=statistics.fmean(row["max_token_hit_rate"] for row in late),
            has_signal=any((row["mean_reward"] or 0) > 0 or row["reward_std"] for row in rows),
            enough=enough.get(condition, 0),
        )
        measured.append(summary)
    return measured


def side_by_side(done: Mapping[str, BenchmarkResult]) -> list[WorkerThroughput]:
    """Return what was measured with each number of workers, where all of them started."""
    concurrent = (benchmark for name, benchmark in done.items() if name.startswith("workers-"))
    return [measured for benchmark in concurrent if (measured := worker_throughput(benchmark)) is not None]


def worker_throughput(benchmark: BenchmarkResult) -> WorkerThroughput | None:
    """Sum the throughput of a benchmark's runs while all were active; None if one took too few steps."""
    runs = benchmark.rows
    if any(len(rows) < STEADY_ROWS for rows in runs):
        return None
    steady = [row for rows in runs for row in rows[1:]]
    alone = [_sum(rows[1:], "tokens_per_step") / _sum(rows[1:], "step_time_s") for rows in runs]
    begin, end = max(rows[0]["timestamp"] for rows in runs), min(rows[-1]["timestamp"] for rows in runs)
    together = [[row for row in rows if begin < row["timestamp"] <= end] for rows in runs]
    span_s, rate = seconds_between(begin, end), sum(alone)
    if span_s and min(map(len, together)) >= STEADY_ROWS:
        rate = sum(_sum(rows, "tokens_per_step") for rows in together) / span_s or rate
    step_s = statistics.median(row["step_time_s"] for row in steady)
    is_short = are_permits_short(benchmark.plan.runs[0].config.backend, benchmark.measured, len(runs))
    waits = permit_wait_fraction(benchmark.measured) if is_short else 0.0
    return WorkerThroughput(len(runs), rate, step_s, waits)


def _sum(rows: Rows, key: str) -> float:
    return float(sum(row[key] for row in rows))


def batch_found(benchmark: BenchmarkResult) -> BatchFound | None:
    """Return what back pressure found; None if it was off."""
    rows = [row for row in benchmark.rows[0] if "bp_regime" in row]
    if not rows:
        return None
    last, training = rows[-1], benchmark.plan.runs[0].config.training
    reasons = [str(row.get("bp_reason", "")) for row in rows]
    too_much = [reason for reason in reasons if OUT_OF_MEMORY in reason]
    counted = [reason for reason in reasons if not reason.startswith("not counted")]
    return BatchFound(
        regimes=tuple(dict.fromkeys(str(row["bp_regime"]) for row in rows)),
        p_star=number_in(last, "bp_p_star"),
        concurrency=training.batch_size * training.group_size,
        batch_size=int(last["bp_batch_size"] if "bp_batch_size" in last else last["batch_size"]),
        reason=(too_much or counted or reasons)[-1],
    )


def out_of_memory_at(benchmark: BenchmarkResult) -> int | None:
    """Return the smallest number of concurrent prompts that did not fit; None if all did."""
    sizes = [number_in(row, "out_of_memory_at") for rows in benchmark.rows for row in rows]
    return min((int(size) for size in sizes if size), default=None)


def batches_per_unit(benchmark: BenchmarkResult) -> float | None:
    """Return the batches per production unit of an unlimited run."""
    rates = [number_in(row, "rate_batches_per_unit") for row in benchmark.rows[0]]
    return next(filter(None, reversed(rates)), None)


def disk_bytes(benchmark: BenchmarkResult) -> tuple[float, float]:
    """Return the bytes of one checkpoint, and of the records of one step, as means over runs."""
    saved, logged = [], []
    for directory, rows in zip(benchmark.runs, benchmark.rows, strict=True):
        checkpoints = [_size(path) for path in directory.glob("checkpoints/step-*") if path.is_dir()]
        saved += checkpoints
        if rows:
            logged.append((_size(directory) - sum(checkpoints)) / len(rows))
    return statistics.fmean(saved or [0.0]), statistics.fmean(logged or [0.0])


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
