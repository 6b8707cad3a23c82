"""Sizes a campaign: runs benchmarks within a time budget, and writes a file with what follows from them.

The calibrated file has the user's values with the changes, and above each change why.
"""

from __future__ import annotations

import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import tomli_w

from retrain.base.errors import ConfigError, LaunchError, RecordsError, first_line
from retrain.campaign import Observer
from retrain.campaign.calibrate import benchmarks
from retrain.campaign.calibrate.advice import Advice, calibrated, changes_of
from retrain.campaign.calibrate.benchmarks import Benchmark, BenchmarkResult, Effort
from retrain.campaign.calibrate.conclude import Calibration, Evidence
from retrain.campaign.launcher_setup import as_launched
from retrain.campaign.orchestrate import Campaign
from retrain.campaign.run import start
from retrain.config.files import located
from retrain.config.keys import Tables, as_toml
from retrain.config.load import load_config, load_tables, parse
from retrain.config.reference import DIRECTIVE
from retrain.config.resolve import merge, runs_side_by_side
from retrain.config.sweep import expanded, variants
from retrain.config.toml_files import naming_bases, write_file
from retrain.control.machine import cpu_capacity, memory_available_bytes
from retrain.plan.build import plan_runs
from retrain.plan.estimate.history import write_crowding
from retrain.plan.matrix import Plan
from retrain.plan.preflight import preflight
from retrain.records.files import write_atomic
from retrain.records.layout import CALIBRATIONS, create_directory
from retrain.records.text import dollars, plain

MOST_PROBE_STEPS = 2000
MARK = "# Calibrated from "
MOST_READ = 1000  # bytes of a line
RETROGRADE = 0.9  # of the best throughput: more workers are not tried beyond this


class Calibrator:
    """One calibration of one file."""

    def __init__(self, path: Path, overrides: Sequence[str], effort: Effort) -> None:
        """Read and check the file; a ConfigError lists every problem. Nothing is run."""
        load_config(path, overrides)  # reports every problem under the file's name
        self._path = path
        self._overrides = overrides
        self._effort = effort
        self._tables: Tables = load_tables(path, overrides)
        with naming_bases(path):
            self.plan = self._plan_of(self._tables)
            self._longest_answers = preflight(self.plan, path.name).longest_answers
        # benchmarks take a condition out by its number
        self._with_points = expanded(self._tables, variants(self._tables))
        self._cores = cpu_capacity()
        self._current: Campaign | None = None  # of the benchmark that runs
        self._was_interrupted = False

    def benchmarks(
        self, log_dir: Path, done: Mapping[str, BenchmarkResult] | None = None
    ) -> Iterator[Benchmark]:
        """Return the benchmarks to run, the most informative first.

        Args:
            log_dir: of their campaigns.
            done: filled by the caller as benchmarks end: quick steps allow longer ones, and a condition that
                took no steps is not tried again.
        """
        effort, runs = self._effort, len(self.plan.runs)
        yield benchmarks.pilot(self._with_points, effort, len(self.plan.conditions), log_dir)
        pilot = done["pilot"].measured if done and "pilot" in done else []
        names = self.plan.conditions
        condition = min((names.index(run.condition) for run in pilot if run.condition in names), default=0)
        config = self.plan.runs[0].config
        if config.rate_limiter.max_staleness > 0:
            yield benchmarks.unlimited(self._with_points, condition, effort.steps, log_dir)
        use = self.plan.device_use if "devices" in config.backend.options else None
        for power in range(min(use.there, config.training.batch_size).bit_length() if use else 0):
            yield benchmarks.on_devices(self._with_points, condition, 1 << power, effort.probe_steps, log_dir)
        if runs > 1 and runs_side_by_side(self.plan.campaign):
            steps = effort.probe_steps
            if pilot:  # workers start one by one, and are to run side by side for long enough
                times_s = (statistics.fmean(run.step_times_s) + run.between_s for run in pilot)
                enough = math.ceil(effort.probe_s / max(statistics.fmean(times_s), 1e-6))
                steps = max(steps, min(MOST_PROBE_STEPS, enough))
            for count in benchmarks.worker_counts(self.plan.workers, self._cores, runs, effort.most_workers):
                yield benchmarks.concurrent(
                    self._with_points, condition, count, steps, log_dir, effort.probe_s
                )
        if not config.backpressure.enabled:
            yield benchmarks.seeking_batch(self._with_points, condition, effort.batch_steps, log_dir)

    def run(
        self, budget_s: float, observe: Callable[[], Observer], begin: Callable[[Benchmark], None]
    ) -> Calibration:
        """Run the benchmarks and draw conclusions; a benchmark that was stopped counts up to there.

        Args:
            budget_s: for all benchmarks together.
            observe: makes the observer of a benchmark's runs.
            begin: called with each benchmark before it begins.

        Raises:
            LaunchError: the pilot could not be started.
            RecordsError: the directory cannot be written.
        """
        directory = create_directory(Path(self.plan.log_dir) / CALIBRATIONS, self.plan.name)
        until_s = time.monotonic() + budget_s
        done: dict[str, BenchmarkResult] = {}
        left_out: list[str] = []
        for benchmark in self.benchmarks(directory, done):
            left_s, left_usd = until_s - time.monotonic(), self.plan.runs[0].config.budget.usd
            if left_usd is not None:
                left_usd -= math.fsum(result.cost_usd or 0.0 for result in done.values())
            reason = self._reason_against(benchmark, left_s, left_usd, done)
            if reason:
                left_out.append(f"{benchmark.name}: {reason}")
                continue
            begin(benchmark)
            try:
                done[benchmark.name] = self._try(benchmark, directory, left_s, left_usd, observe())
            except (ConfigError, LaunchError, RecordsError) as error:
                if not done:  # else what other benchmarks measured is kept
                    raise
                left_out.append(f"{benchmark.name}: {first_line(error)}")
        evidence = Evidence(
            self.plan, self._with_points, self._longest_answers, done, self._cores, self._plan_of
        )
        if evidence.crowding is not None:
            with suppress(RecordsError):  # on a full disk; what was found is still shown
                write_crowding(directory, evidence.crowding)
        return evidence.conclusion(
            self._path.name, directory, left_out, was_interrupted=self._was_interrupted
        )

    def interrupt(self, *, now: bool = False) -> None:
        """Stop the benchmark that runs, and start no other; for signal handlers."""
        self._was_interrupted = True
        if self._current is not None:
            self._current.stop(now=now)

    def _try(
        self, benchmark: Benchmark, directory: Path, left_s: float, left_usd: float | None, observer: Observer
    ) -> BenchmarkResult:
        """Run one benchmark until it ends or time or money is up; raises as `start` does."""
        path = directory / f"{benchmark.name}.toml"
        budget = {} if left_usd is None else {"budget": {"usd": left_usd}}
        write_atomic(path, tomli_w.dumps(merge(benchmark.tables, budget)))
        campaign = self._current = start(path, (), observer, beside=self._path.parent)
        began_s = time.monotonic()
        try:
            with benchmarks.stopped_after(left_s, campaign), benchmarks.WorkerMemory() as memory:
                if not self._was_interrupted:
                    campaign.execute()
        finally:
            self._current = None
        runs = tuple(campaign.files_of(run.run_id).directory for run in campaign.plan.runs)
        took_s = time.monotonic() - began_s
        return BenchmarkResult(
            campaign.plan, campaign.directory, runs, took_s, memory.most, memory.most_on_gpus
        )

    def _reason_against(
        self, benchmark: Benchmark, left_s: float, left_usd: float | None, done: Mapping[str, BenchmarkResult]
    ) -> str:
        if self._was_interrupted:
            return "interrupted"
        if left_s <= 0:
            return "the time budget is used up"
        steps_usd = (spending.largest_step_usd for result in done.values() for spending in result.spent)
        least_usd = benchmark.runs * max(steps_usd, default=0.0)
        if left_usd is not None and least_usd and left_usd < least_usd:
            left, least = dollars(max(left_usd, 0.0)), dollars(least_usd)
            return f"{left} are left of the budget, and a step of each of its runs costs up to {least}"
        if "pilot" in done and not done["pilot"].measured:
            return "no condition completed two steps in the pilot"
        if not benchmark.name.startswith("workers-"):
            return ""
        worker_bytes = max((result.worker_bytes for result in done.values()), default=0)
        if worker_bytes * benchmark.runs > memory_available_bytes():
            return f"{benchmark.runs} workers of {worker_bytes / 1e6:.0f} MB do not fit in memory"
        side = benchmarks.side_by_side(done)
        best = max((measured.tokens_per_second for measured in side), default=0.0)
        if side and side[-1].tokens_per_second < RETROGRADE * best:
            return f"{side[-1].workers} workers had a lower total throughput than fewer workers"
        return ""

    def write(self, found: Calibration, target: Path) -> Calibration:
        """Write the calibrated file; raise RecordsError if it cannot be written."""
        schema, tables = schema_line(self._path), self._tables
        if not target.parent.samefile(self._path.parent):
            tables = dict(located(tables, self._path.parent))
        text = to_toml(tables, found.advice, self._path.name, self._overrides, schema)
        try:
            write_file(target.resolve(), text)
        except OSError as error:
            raise RecordsError(f"{target}: cannot be written ({error.strerror})") from error
        return replace(found, written=str(target))

    def _plan_of(self, tables: Tables) -> Plan:
        config = parse(tables, self._path.name, try_plugins=False, beside=self._path.parent)
        return as_launched(plan_runs(config, self._path.name), self._path.name)


def to_toml(
    tables: Tables, advice: Sequence[Advice], source: str, overrides: Sequence[str] = (), schema: str = ""
) -> str:
    """Return the calibrated file: a comment above each changed key, and the `--set` overrides at the top.

    `tables` are the original's, with the overrides; `schema` is its directive for editors, if it has one.
    """
    lines = [
        *([schema] if schema else []),
        f"{MARK}{plain(source)}: a comment above each changed value gives the reason.",
        *(f"# with --set {plain(override)}" for override in overrides),
        "",
        *tomli_w.dumps(calibrated(tables, advice)).splitlines(),
    ]
    for change in changes_of(advice):
        section, _, key = change.key.partition(".")
        start = lines.index(f"[{section}]")
        at = next(n for n in range(start, len(lines)) if re.match(rf"{re.escape(key)}\s*=", lines[n]))
        lines.insert(at, f"# was {as_toml(change.now)}: {plain(change.why)}")
    return "\n".join(lines) + "\n"


def check_target(target: Path, source: Path) -> None:
    """Check, before anything runs, that the target may be written.

    It may not be the file being calibrated (ConfigError), nor one that was not written by a calibration.
    """
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise RecordsError(
            f"{target}: its directory does not exist or is not writable; choose another with --output"
        )
    if not target.exists():
        return
    if target.samefile(source):
        raise ConfigError(f"{target}: is the file being calibrated; choose another --output")
    if not target.is_file() or not any(line.startswith(MARK.encode()) for line in _first_lines(target)):
        raise ConfigError(f"{target}: was not written by a calibration; move it, or choose another --output")
    if not os.access(target, os.W_OK):
        raise RecordsError(f"{target}: is not writable; choose another with --output")


def schema_line(source: Path) -> str:
    """Return the schema directive for editors, if a file begins with one."""
    first = _first_lines(source)[0].decode("utf-8-sig", "replace").strip()
    return plain(first) if first.startswith(DIRECTIVE.partition(" ")[0]) else ""


def _first_lines(path: Path) -> list[bytes]:
    with path.open("rb") as file:
        return [file.readline(MOST_READ), file.readline(MOST_READ)]
