"""Reads what benchmarks measured from their records. Writes nothing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from retrain.base.clock import seconds_between
from retrain.campaign.calibrate.benchmarks import BenchmarkResult, Rows
from retrain.config.schema import BackendSection
from retrain.plan.estimate.history import RunTimes
from retrain.records.lines import number_in

OUT_OF_MEMORY = "out of memory"  # in a controller's reason
STEADY_ROWS = 3  # minimum for a meaningful throughput: the first step is a warm-up


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
    return [
        _lengths(condition, run.config.training.max_tokens, enough.get(condition, 0), rows)
        for condition, run in benchmark.plan.first_runs.items()
        if (rows := [row for row in all_rows if row["condition"] == condition])
    ]


def _lengths(condition: str, allowed: int, enough: int, rows: Rows) -> Lengths:
    late = 2 * max(row["step"] for row in rows) / 3
    return Lengths(
        condition,
        allowed,
        statistics.fmean(row["max_token_hit_rate"] for row in rows),
        statistics.median(row["length_p50"] for row in rows),
        statistics.median(row["length_p95"] for row in rows),
        int(max(row["length_max"] for row in rows)),
        statistics.fmean(row["max_token_hit_rate"] for row in rows if row["step"] > late),
        any((row["mean_reward"] or 0) > 0 or row["reward_std"] for row in rows),
        enough,
    )


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
