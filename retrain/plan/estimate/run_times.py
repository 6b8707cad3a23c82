"""Times of one run from its records: steps, start-up, closing and failures."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from retrain.base.clock import posix_s, seconds_between
from retrain.base.errors import DamagedRecordError, RecordsError
from retrain.config.keys import Tables
from retrain.plan.estimate.money import Billed, billed_of
from retrain.plan.estimate.workload import AliveSpan, Crowding
from retrain.records.decision import HELD_OUT
from retrain.records.layout import RunFiles, recorded_tables
from retrain.records.lines import Row, number_in
from retrain.records.metrics import MetricsEnds, mean, median, read_ends
from retrain.records.run_row import active_s, paused_between_s
from retrain.records.run_state import Attempt, Done, RunState, read_attempts, read_done

LONGEST_S = 1e9  # of a step: 30 years
MOST_ROWS = 500  # the last ones of a run, so that a long run costs no more than a short one
CALLING = ("step_time_s", "sample_time_s", "train_time_s", "permit_wait_s", "permit_held_s")
WAITING = "environment_wait_s"
RETRIED = (RunState.INFRASTRUCTURE, RunState.STALLED)


@dataclass(frozen=True, slots=True)
class StepParts:
    """Where a mean step's time went, in seconds."""

    sampling_s: float
    scoring_s: float
    training_s: float
    permit_wait_s: float  # during sampling and training; summed over calls, so it may exceed them
    permit_held_s: float  # likewise
    calls_at_once: int  # permits held or waited for together, on average


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Times of one run. The first step of an attempt counts as start-up, because it warms up."""

    condition: str
    tables: Tables  # its configuration: run.toml
    step_times_s: tuple[float, ...]  # without waits for permits, oldest first
    whole_step_times_s: tuple[float, ...]  # with them, as measured
    parts: StepParts
    between_s: float  # between two steps without a checkpoint or an evaluation
    startup_s: float | None  # from the attempt's start to its first steady step
    closing_s: float | None  # from the last row to the attempt's end; None if it did not finish
    checkpoint_s: float  # closing_s holds one, and the last evaluations
    evals_s: Mapping[str, float]  # one evaluation of each kind, by what its columns begin with
    max_token_hit_rate: float | None
    permits_borne: float | None  # if permits adapt: mean since the first decrease; None without one
    failures: int  # infrastructure failures
    active_s: float  # taking steps, over all attempts
    passes: int  # over each batch
    billed: Billed  # in its last rows
    span: tuple[float, float] | None = None  # start and end of its last attempt, in seconds since 1970
    alive: tuple[AliveSpan, ...] = ()  # runs alive in that span, itself included; empty if not known
    at_a_time: int = 0  # concurrent runs of its campaign; 0 if not known

    def alone(self, crowding: Crowding) -> RunTimes:
        """Return the run with its times converted to those of a run alone."""
        factor = 1 / crowding.over(self.alive or ((1.0, max(1, self.at_a_time)),))
        if factor == 1.0:
            return self
        return replace(
            self.slowed(factor),
            startup_s=self.startup_s and factor * self.startup_s,
            closing_s=self.closing_s and factor * self.closing_s,
            checkpoint_s=factor * self.checkpoint_s,
            evals_s={name: factor * seconds for name, seconds in self.evals_s.items()},
        )

    def slowed(self, factor: float) -> RunTimes:
        return replace(
            self,
            step_times_s=tuple(factor * seconds for seconds in self.step_times_s),
            between_s=factor * self.between_s,
            parts=replace(self.parts, permit_held_s=factor * self.parts.permit_held_s),
        )

    def trained_for(self, passes: int) -> RunTimes:
        """Return the run with the step times that it would have with so many passes over each batch."""
        parts, more = self.parts, passes / self.passes
        whole_s = parts.sampling_s + parts.scoring_s + parts.training_s
        if more == 1 or not whole_s:
            return self
        longer = 1 + parts.training_s / whole_s * (more - 1)
        times = tuple(longer * seconds for seconds in self.step_times_s)
        return replace(self, step_times_s=times, billed=self.billed.with_passes(more))

    @property
    def is_finished(self) -> bool:
        return self.closing_s is not None


def read_run_times(directory: Path) -> RunTimes | None:
    """Read one run's directory; None if its last attempt has fewer than two complete steps.

    Raises:
        RecordsError: its files cannot be read.
    """
    files = RunFiles(directory)
    tables = {name: one for name, one in recorded_tables(files).items() if isinstance(one, dict)}
    ends, attempts = read_ends(files.metrics, MOST_ROWS), read_attempts(files.attempts)
    if not ends.last or not attempts:
        return None
    if not tables:
        raise RecordsError(f"{files.run_toml}: cannot be read")
    number = ends.last[-1].get("attempt")
    attempt = next((a for a in attempts if a.number == number), attempts[-1])
    failures = sum(a.ending in RETRIED for a in attempts)
    try:
        return _times_of(files, tables, attempt, ends, failures)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DamagedRecordError(f"{directory}: holds values that no run has ({error!r})") from error


def _times_of(
    files: RunFiles, tables: Tables, attempt: Attempt, ends: MetricsEnds, failures: int
) -> RunTimes | None:
    """Return what the last rows of a run tell, which an attempt wrote; None if it took no steady step."""
    rows = _steps_of(ends.last)
    steady = [row for row in rows if row["step"] > attempt.resumed_from_step + 1]
    if not steady:
        return None
    done, evaluations, parts = read_done(files.done), _evaluations(tables), _parts(steady)
    finished = done if attempt.ending == RunState.DONE else None
    closing_s = seconds_between(rows[-1].get("timestamp"), attempt.ended_at) if finished else None
    evals_s = {prefix: _evaluation_s(rows, done, f"{prefix}time_s") for prefix in evaluations}
    checkpoint_s = max(0.0, (closing_s or 0.0) - math.fsum(evals_s.values()))
    step_times_s = tuple(_alone_s(row, parts.calls_at_once) for row in steady)
    ahead = int(tables.get("rate_limiter", {}).get("max_staleness", 0))
    save_every = int(tables.get("training", {}).get("save_every", 0))
    return RunTimes(
        condition=str(tables.get("run", {}).get("condition", "")),
        tables=tables,
        step_times_s=step_times_s,
        whole_step_times_s=tuple(_seconds(row, "step_time_s") for row in steady),
        parts=parts,
        between_s=_between_s(dict(_gaps(rows, evaluations)), save_every, checkpoint_s),
        startup_s=_startup_s(attempt, ends.first, step_times_s),
        closing_s=closing_s,
        checkpoint_s=checkpoint_s,
        evals_s=evals_s,
        max_token_hit_rate=mean(number_in(row, "max_token_hit_rate") for row in steady),
        permits_borne=_permits_borne(rows),
        failures=failures,
        active_s=statistics.fmean(step_times_s) * int(ends.last[-1]["step"]),
        passes=max(1, int(tables.get("training", {}).get("updates_per_batch", 1))),
        billed=billed_of(files, ends.last, evaluations, finished, ahead),
        span=_span(attempt, rows[-1]),
    )


def _evaluations(tables: Tables) -> list[str]:
    """Return what the columns of each evaluation begin with: its own, and each `[[eval]]` of a run.toml."""
    found = tables.get("eval", {}).get("tables", [])
    named = [one.get("name") for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    return [HELD_OUT, *(f"{HELD_OUT}{name}_" for name in named)]


def _startup_s(attempt: Attempt, first: Row | None, times_s: Sequence[float]) -> float | None:
    """Return the time from an attempt's start to its first row, beyond that of a usual step.

    `first` is the first row of the run, which another attempt may have written.
    """
    own = first if first and first.get("attempt") == attempt.number else {}
    until_first_s = seconds_between(attempt.started_at, own.get("timestamp"))
    return None if until_first_s is None else max(0.0, until_first_s - statistics.median(times_s))


def _steps_of(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the last row's attempt that have a measured step time, without pauses."""
    own = [row for row in rows if row.get("attempt") == rows[-1].get("attempt")]
    return [_without_pauses(row) for row in own if _seconds(row, "step_time_s")]


def _without_pauses(row: Row) -> Row:
    """Return a step's row with the times of its calls as they are without pauses of the API."""
    working_s = active_s(row)
    if not working_s or not _seconds(row, "api_pause_s"):
        return row
    share = working_s / _seconds(row, "step_time_s")
    return {**row, **{key: share * _seconds(row, key) for key in CALLING}}


def _span(attempt: Attempt, last: Row) -> tuple[float, float] | None:
    """Return when an attempt began and ended; None if that is unknown, or it has no length."""
    begin_s, end_s = posix_s(attempt.started_at), posix_s(attempt.ended_at or last.get("timestamp"))
    return (begin_s, end_s) if begin_s is not None and end_s is not None and begin_s < end_s else None


def _evaluation_s(rows: Sequence[Row], done: Done | None, key: str) -> float:
    """Return the time of an evaluation: of the last one, else the mean of those in the rows."""
    last = _time_s(done.result, key) if done else None
    return last if last is not None else mean(_time_s(row, key) for row in rows) or 0.0


def _seconds(row: Row, key: str) -> float:
    """Return a row's time; 0 if it is missing, or as no clock measures it."""
    return _time_s(row, key) or 0.0


def _time_s(columns: Mapping[str, object], key: str) -> float | None:
    seconds = number_in(columns, key)
    return seconds if seconds is not None and 0 <= seconds < LONGEST_S else None


def _parts(rows: Sequence[Row]) -> StepParts:
    def average(key: str) -> float:
        return math.fsum(_seconds(row, key) for row in rows) / len(rows)

    waited, held = average("permit_wait_s"), average("permit_held_s")
    sampling, training = average("sample_time_s"), average("train_time_s")
    calling = sampling + training - min(sampling, average(WAITING))  # no call while environments answer
    together = round((waited + held) / calling) if calling and held else 1
    return StepParts(sampling, average("reward_time_s"), training, waited, held, max(1, together))


def _alone_s(row: Row, calls_at_once: int) -> float:
    """Return a step's time without its wait for permits; concurrent waits overlap."""
    waited = _seconds(row, "permit_wait_s") / calls_at_once
    step_s = _seconds(row, "step_time_s")
    return max(step_s - waited, 0.01 * step_s)


def _permits_borne(rows: Sequence[Row]) -> float | None:
    """Return the mean number of permits since the API first reached its limit, after the initial growth."""
    known = [permits for row in rows if (permits := number_in(row, "permits")) is not None]
    first = next((i for i, (before, now) in enumerate(itertools.pairwise(known), 1) if now < before), None)
    return statistics.fmean(known[first:]) if first is not None else None


def _between_s(gaps: Mapping[int, float], save_every: int, checkpoint_s: float) -> float:
    """Return the median gap, by the step before it, without checkpoints, which are counted separately."""
    without = [gap for step, gap in gaps.items() if not save_every or step % save_every]
    if without:
        return median(without) or 0.0
    return max(0.0, (median(gaps.values()) or 0.0) - checkpoint_s)


def _gaps(rows: Sequence[Row], evaluations: Sequence[str]) -> Iterator[tuple[int, float]]:
    """Iterate over the times between two steps, without evaluations, by the step before.

    A row has the time at the end of its step; its evaluations follow.
    """
    for before, row in itertools.pairwise(rows):
        whole_s = seconds_between(before.get("timestamp"), row.get("timestamp"))
        if whole_s is not None:
            counted_s = math.fsum(_seconds(before, f"{prefix}time_s") for prefix in evaluations)
            counted_s += paused_between_s(before, row) + _seconds(row, "step_time_s")
            yield int(before["step"]), max(0.0, whole_s - counted_s)
