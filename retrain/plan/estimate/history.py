"""Earlier campaigns in a log directory: each run's times, and how accurate the forecasts were."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from retrain.base.clock import posix_s, seconds_between
from retrain.base.errors import DamagedRecordError, RecordsError
from retrain.config.keys import Tables
from retrain.config.resolve import label_of
from retrain.plan.estimate.money import Billed, billed_of
from retrain.plan.estimate.workload import Alive, AliveSpan, Crowding
from retrain.records.decision import HELD_OUT
from retrain.records.files import read_json, readable, record_of, write_json
from retrain.records.layout import (
    CampaignFiles,
    RunFiles,
    by_start,
    find_campaigns,
    is_single_run,
    recorded_tables,
)
from retrain.records.lines import Row, number_in
from retrain.records.manifest import Expectation, Manifest, read_manifest
from retrain.records.metrics import MetricsEnds, mean, median, read_ends
from retrain.records.provenance import known_origin
from retrain.records.run_row import active_s, paused_between_s
from retrain.records.run_state import Attempt, Done, RunState, read_attempts, read_done, read_start

LONGEST_S = 1e9  # of a step: 30 years
MOST_ROWS = 500  # the last ones of a run, so that a long run costs no more than a short one
CALLING = ("step_time_s", "sample_time_s", "train_time_s", "permit_wait_s", "permit_held_s")
WAITING = "environment_wait_s"
RETRIED = (RunState.INFRASTRUCTURE, RunState.STALLED)
CROWDING = "crowding.json"  # in a calibration's directory: slowdowns by concurrent runs, [runs, slowdown]
MOST_RUNS = 96  # read in total, the newest first: takes under a second
MOST_OF_A_CONDITION = 12  # more add little
MOST_SEEDS = 3  # of a condition per campaign: a recent smoke test must not hide an older pilot


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
class Refilling:
    """How a run's steps refilled their batches, and how many groups taught nothing."""

    most: int  # further batches of a step; 0: none
    batches: float  # sampled per step, on average
    tied: tuple[float, ...]  # share of each step's groups without a signal

    def batches_with(self, most: int) -> float:
        """Return how many batches a step samples on average, if each may have so many further ones."""
        return statistics.fmean(min(1 + most, 1 / (1 - tied)) if tied < 1 else 1 + most for tied in self.tied)


def devices_in(tables: Tables, there: int) -> int:
    """Return the number of devices of an earlier run; all are those that are there now."""
    devices = tables.get("backend", {}).get("options", {}).get("devices", 1)
    return devices if isinstance(devices, int) else there


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Times of one run. The first step of an attempt counts as start-up, because it warms up."""

    condition: str
    tables: Tables  # its configuration: run.toml
    step_times_s: tuple[float, ...]  # without waits for permits, oldest first
    whole_step_times_s: tuple[float, ...]  # with them, as measured
    parts: StepParts
    between_s: float  # between two steps without a checkpoint or an evaluation
    startup_s: float | None  # from the attempt's start to a steady step, without warm-up and evaluations
    closing_s: float | None  # from the last row to the attempt's end; None if it did not finish
    warm_up_s: float | None  # all of `[warmup]`; None if it has none, or another run trained it
    checkpoint_s: float  # closing_s holds one, and the last evaluations
    evals_s: Mapping[str, float]  # one evaluation of each kind, by what its columns begin with
    max_token_hit_rate: float | None
    permits_borne: float | None  # if permits adapt: mean since the first decrease; None without one
    permits_adapt: bool | None  # whether the backend reported calls, as "auto" needs; None: not asked to
    failures: int  # infrastructure failures
    active_s: float  # taking steps, over all attempts
    passes: int  # over each batch
    billed: Billed  # in its last rows
    span: tuple[float, float] | None = None  # start and end of its last attempt, in seconds since 1970
    alive: tuple[AliveSpan, ...] = ()  # runs alive in that span, itself included; empty if not known
    at_a_time: int = 0  # concurrent runs of its campaign; 0 if not known
    refilling: Refilling | None = None  # None: its rows do not tell how many groups taught nothing

    def alone(self, crowding: Crowding, size: float = 1.0) -> RunTimes:
        """Return the run with its times converted to those of a run alone.

        `size` are the devices of a run here, relative to one of those that `crowding` counts.
        """
        alive = self.alive or ((1.0, max(1, self.at_a_time)),)
        factor = 1 / crowding.over([(seconds, size * count) for seconds, count in alive])
        if factor == 1.0:
            return self
        return replace(
            self.slowed(factor),
            startup_s=self.startup_s and factor * self.startup_s,
            closing_s=self.closing_s and factor * self.closing_s,
            warm_up_s=self.warm_up_s and factor * self.warm_up_s,
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

    def refilled_with(self, most: int) -> RunTimes:
        """Return the run as if its steps had refilled their batches by up to so many further ones."""
        if self.refilling is None or most == self.refilling.most:
            return self
        ratio, parts = self.refilling.batches_with(most) / self.refilling.batches, self.parts
        sampled_s = parts.sampling_s + parts.scoring_s
        if ratio == 1 or not (whole_s := sampled_s + parts.training_s):
            return self
        longer = 1 + sampled_s / whole_s * (ratio - 1)
        times = tuple(longer * seconds for seconds in self.step_times_s)
        billed = self.billed.scaled(dict.fromkeys(("prefill", "cached", "sample"), ratio))
        return replace(self, step_times_s=times, billed=billed)

    def trained_for(self, passes: int) -> RunTimes:
        """Return the run with the step times that it would have with so many passes over each batch."""
        parts, more = self.parts, passes / self.passes
        whole_s = parts.sampling_s + parts.scoring_s + parts.training_s
        if more == 1 or not whole_s:
            return self
        longer = 1 + parts.training_s / whole_s * (more - 1)
        times = tuple(longer * seconds for seconds in self.step_times_s)
        return replace(self, step_times_s=times, billed=self.billed.scaled({"train": more}))

    @property
    def is_finished(self) -> bool:
        return self.closing_s is not None


def read_run_times(directory: Path) -> RunTimes | None:
    """Read one run's directory; None if its last attempt has fewer than two complete steps.

    Raises:
        RecordsError: its files cannot be read.
    """
    files = RunFiles(directory)
    tables = {name: table for name, table in recorded_tables(files).items() if isinstance(table, dict)}
    ends, attempts = read_ends(files.metrics, MOST_ROWS), read_attempts(files.attempts)
    if not ends.last or not attempts:
        return None
    if not tables:
        raise RecordsError(f"{files.run_toml}: cannot be read")
    number = ends.last[-1].get("attempt")
    attempt = next((a for a in attempts if a.number == number), attempts[-1])
    failures = sum(a.ending in RETRIED for a in attempts)
    try:
        was_asked_again = attempt.ending == RunState.DONE and attempt is not attempts[-1]
        return _times_of(files, tables, attempt, ends, failures, was_asked_again=was_asked_again)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise DamagedRecordError(f"{directory}: holds values that no run has ({error!r})") from error


def _times_of(
    files: RunFiles,
    tables: Tables,
    attempt: Attempt,
    ends: MetricsEnds,
    failures: int,
    *,
    was_asked_again: bool,
) -> RunTimes | None:
    """Return what the last rows of a run tell, which an attempt wrote; None if it took no steady step.

    A last evaluation with further questions counts as one of its own size. If it was asked after the attempt
    had ended, the attempt made that one too.
    """
    rows = _steps_of(ends.last)
    steady = [row for row in rows if row["step"] > attempt.resumed_from_step + 1]
    if not steady:
        return None
    # what the columns of each evaluation begin with: its own, and each `[[eval]]` of the run.toml
    tables_of = tables.get("eval", {}).get("tables", [])
    listed = tables_of if isinstance(tables_of, list) else []
    named = [f"{HELD_OUT}{table.get('name')}_" for table in listed if isinstance(table, dict)]
    evaluations = [HELD_OUT, *named]
    done, parts = read_done(files.done), _parts(steady)
    finished = done if attempt.ending == RunState.DONE else None
    closing_s = seconds_between(rows[-1].get("timestamp"), attempt.ended_at) if finished else None
    evals_s, own_shares = {}, _own_shares(dict(zip(named, listed, strict=False)), done)
    for key in evaluations:
        last_s = _time_s(done.result, f"{key}time_s") if done else None
        if last_s is None:
            evals_s[key] = mean(_time_s(row, f"{key}time_s") for row in rows) or 0.0
            continue
        evals_s[key] = own_shares.get(key, 1.0) * last_s
        if closing_s is not None and not was_asked_again:
            closing_s = max(evals_s[key], closing_s - last_s + evals_s[key])
    checkpoint_s = max(0.0, (closing_s or 0.0) - math.fsum(evals_s.values()))
    whole_s = [_seconds(row, "step_time_s") for row in steady]
    waits_s = [_seconds(row, "permit_wait_s") / parts.calls_at_once for row in steady]  # which overlap
    step_times_s = tuple(
        max(step_s - wait_s, 0.01 * step_s) for step_s, wait_s in zip(whole_s, waits_s, strict=True)
    )
    warm_up = read_ends(files.warmup, MOST_ROWS).last
    startup_s, warm_up_s = _before_steps(
        files, warm_up, evaluations, _startup_s(attempt, ends.first, step_times_s)
    )
    with_permits = [row for row in rows if number_in(row, "permits") is not None]
    permits = [float(row["permits"]) for row in with_permits]
    decreases = (i for i, (before, after) in enumerate(itertools.pairwise(permits), 1) if after < before)
    first_decrease = next(decreases, 0)  # the API first reached its limit, after the initial growth
    save_every = int(tables.get("training", {}).get("save_every", 0))
    return RunTimes(
        condition=str(tables.get("run", {}).get("condition", "")),
        tables=tables,
        step_times_s=step_times_s,
        whole_step_times_s=tuple(whole_s),
        parts=parts,
        between_s=_between_s(rows, evaluations, save_every, checkpoint_s),
        startup_s=startup_s,
        closing_s=closing_s,
        warm_up_s=warm_up_s,
        checkpoint_s=checkpoint_s,
        evals_s=evals_s,
        max_token_hit_rate=mean(number_in(row, "max_token_hit_rate") for row in steady),
        permits_borne=statistics.fmean(permits[first_decrease:]) if first_decrease else None,
        permits_adapt=not any(row.get("permits_fixed") for row in with_permits) if permits else None,
        failures=failures,
        active_s=statistics.fmean(step_times_s) * int(ends.last[-1]["step"]),
        passes=max(1, int(tables.get("training", {}).get("updates_per_batch", 1))),
        billed=billed_of(
            files,
            ends.last,
            warm_up,
            {name: own_shares.get(name, 1.0) for name in evaluations},
            finished,
            int(tables.get("rate_limiter", {}).get("max_staleness", 0)),
            was_asked_again=was_asked_again,
        ),
        span=_span(attempt, rows[-1]),
        refilling=_refilling(tables, steady),
    )


def _before_steps(
    files: RunFiles, warm_up: Sequence[Row], evaluations: Sequence[str], until_steps_s: float | None
) -> tuple[float | None, float | None]:
    """Return the seconds of the start alone and of the warm-up; None: not known, or there was none."""
    if warm_up and "made_by" in warm_up[-1]:  # it may have waited for the run that trained it
        return None, None
    warm_up_s = None
    if warm_up:
        warm_up_s = warm_up[-1]["step"] * statistics.fmean(_seconds(row, "step_time_s") for row in warm_up)
    if until_steps_s is None:
        return None, warm_up_s
    start = dict(read_start(files).metrics)
    evaluations_s = math.fsum(_seconds(start, f"{key}time_s") for key in evaluations)
    return max(0.0, until_steps_s - evaluations_s - (warm_up_s or 0.0)), warm_up_s


def _own_shares(named: Mapping[str, Mapping[str, Any]], done: Done | None) -> dict[str, float]:
    """Return which share of the questions of a run's end its own were, where `[decision]` asked more.

    Args:
        named: the table of each `[[eval]]`, by what its columns begin with.
    """
    shares = {}
    for key, table in named.items():
        asked = number_in(done.result, f"{key}questions") if done else None
        if asked and (own := number_in(table, "prompts")):
            shares[key] = min(1.0, own / asked)
    return shares


def _refilling(tables: Tables, rows: Sequence[Row]) -> Refilling | None:
    data = tables.get("data", {})
    tied = [number_in(row, "zero_signal_group_fraction") for row in rows]
    shares = tuple(min(max(share, 0.0), 1.0) for share in tied if share is not None)
    further = [
        (number_in(row, "refill_sampled") or 0.0) / (number_in(row, "batch_size") or 1.0) for row in rows
    ]
    most = 0 if data.get("refill", "none") == "none" else int(data.get("refill_most", 3))
    return Refilling(most, 1 + statistics.fmean(further), shares) if shares else None


def _startup_s(attempt: Attempt, first: Row | None, times_s: Sequence[float]) -> float | None:
    """Return the time from an attempt's start to its first row, beyond that of a usual step.

    `first` is the first row of the run, which another attempt may have written.
    """
    if first is None or first.get("attempt") != attempt.number:
        return None
    until_first_s = seconds_between(attempt.started_at, first.get("timestamp"))
    return None if until_first_s is None else max(0.0, until_first_s - statistics.median(times_s))


def _steps_of(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the last row's attempt that have a measured step time, without pauses."""
    steps = []
    for row in rows:
        step_s = _seconds(row, "step_time_s")
        if row.get("attempt") == rows[-1].get("attempt") and step_s:
            working_s = active_s(row)
            if working_s and _seconds(row, "api_pause_s"):
                row = {**row, **{key: working_s / step_s * _seconds(row, key) for key in CALLING}}
            steps.append(row)
    return steps


def _span(attempt: Attempt, last: Row) -> tuple[float, float] | None:
    """Return when an attempt began and ended; None if that is unknown, or it has no length."""
    begin_s, end_s = posix_s(attempt.started_at), posix_s(attempt.ended_at or last.get("timestamp"))
    return (begin_s, end_s) if begin_s is not None and end_s is not None and begin_s < end_s else None


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


def _between_s(
    rows: Sequence[Row], evaluations: Sequence[str], save_every: int, checkpoint_s: float
) -> float:
    """Return the median time between two steps, without evaluations and checkpoints: they count separately.

    A row has the time at the end of its step; its evaluations follow.
    """
    gaps, without_checkpoint = [], []
    for before, row in itertools.pairwise(rows):
        whole_s = seconds_between(before.get("timestamp"), row.get("timestamp"))
        if whole_s is not None:
            counted_s = math.fsum(_seconds(before, f"{prefix}time_s") for prefix in evaluations)
            counted_s += paused_between_s(before, row) + _seconds(row, "step_time_s")
            gaps.append(max(0.0, whole_s - counted_s))
            if not save_every or int(before["step"]) % save_every:
                without_checkpoint.append(gaps[-1])
    if without_checkpoint:
        return statistics.median(without_checkpoint)
    return max(0.0, (median(gaps) or 0.0) - checkpoint_s)


@dataclass(frozen=True)
class Launches:
    """How long a campaign's workers took to start."""

    launcher: str
    mean_s: float  # from the campaign's start, or the previous run's end, to a worker's first record
    alive: int  # runs at a time while they started


@dataclass(frozen=True)
class History:
    """Times of earlier runs."""

    runs: tuple[RunTimes, ...]  # the newest campaign's first
    launches: tuple[Launches, ...]  # of campaigns whose runs each took one attempt
    expectations: tuple[Expectation, ...]  # predicted and actual times of finished campaigns
    crowding: Crowding | None = None  # slowdown by concurrent runs, if a calibration measured it
    sources: tuple[RunTimes, ...] = ()  # of the runs those that a plan's steps are measured by

    def alone(self, crowding: Crowding, devices: int = 1) -> History:
        """Return runs and launches with their times converted to those of a run alone.

        `devices` are those of each run that `crowding` counts.
        """
        runs = tuple(run.alone(crowding, devices_in(run.tables, devices) / devices) for run in self.runs)
        launches = tuple(replace(x, mean_s=x.mean_s / crowding.of(x.alive), alive=1) for x in self.launches)
        return replace(self, runs=runs, launches=launches)

    @property
    def startup_s(self) -> float | None:
        """Median seconds from a worker's first record to the first step."""
        return median(self.values(lambda run: run.startup_s))

    def evaluation_s(self, prefix: str) -> float | None:
        """Return the mean seconds of an evaluation, named by what its columns begin with."""
        return mean(self.values(lambda run: run.evals_s.get(prefix)))

    def values(self, read: Callable[[RunTimes], float | None]) -> list[float]:
        """Return what is known of the sources; if nothing is, of all runs."""
        of_both = [[read(run) for run in runs] for runs in (self.sources, self.runs)]
        of_sources, of_all = ([value for value in values if value is not None] for values in of_both)
        return of_sources or of_all

    def launch_s(self, launcher: str) -> float | None:
        """Return the median seconds that a launcher takes from a free slot to a worker's first record."""
        return median(each.mean_s for each in self.launches if each.launcher == launcher)

    @property
    def closing_s(self) -> float | None:
        """Median seconds from the last step to the run's end."""
        return median(self.values(lambda run: run.closing_s))

    @property
    def failures_per_hour(self) -> float:
        hours = math.fsum(run.active_s for run in self.runs) / 3600
        return sum(run.failures for run in self.runs) / hours if hours else 0.0


def learn(log_dir: Path, conditions: Iterable[str] = ()) -> History:
    """Read the history of the campaigns and single runs in a directory, which may itself be one.

    Runs of `conditions` are read first; runs that cannot be read are left out.
    """
    return learn_from(find_campaigns(log_dir), conditions)


def learn_from(
    campaigns: Iterable[Path], conditions: Iterable[str] = (), most_of_a_condition: int = MOST_OF_A_CONDITION
) -> History:
    """Read the history of given campaigns, as `learn` does: the newest first, some runs of each condition."""
    newest_first = sorted(campaigns, key=by_start, reverse=True)
    manifests = {path: readable(read_manifest, CampaignFiles(path).manifest) for path in newest_first}
    labels = set(map(label_of, conditions))
    candidates = [(path, run) for path in newest_first for run in _run_directories(path, manifests[path])]
    candidates.sort(key=lambda candidate: _label(candidate[1]) not in labels)
    counts: Counter[object] = Counter()
    timed: list[tuple[Path, RunTimes]] = []
    for campaign, directory in candidates:
        label, of_campaign = _label(directory), (campaign, _label(directory))
        is_enough = counts[label] >= most_of_a_condition or counts[of_campaign] >= MOST_SEEDS
        if is_enough or (run := readable(read_run_times, directory)) is None:
            continue
        counts.update((label, of_campaign))
        timed.append((campaign, run))
        if len(timed) == MOST_RUNS:
            break
    used = {}
    for campaign in dict.fromkeys(campaign for campaign, _ in timed):
        manifest = manifests[campaign]
        entries = manifest.runs if manifest is not None else ()
        spans = [(posix_s(entry.started_at), posix_s(entry.ended_at)) for entry in entries]
        ended = [(begin_s, end_s) for begin_s, end_s in spans if begin_s is not None and end_s is not None]
        used[campaign] = Alive(ended, _at_a_time(manifest))
    read = {path: manifest for path, manifest in manifests.items() if path in used and manifest is not None}
    runs = (
        replace(_beside(run, used[campaign]), at_a_time=_at_a_time(manifests[campaign]))
        for campaign, run in timed
    )
    expected = (m.expected for m in read.values() if m.expected and m.expected.actual_s is not None)
    crowding = next(filter(None, (readable(_read_crowding, path.parent) for path in used)), None)
    return History(tuple(runs), tuple(_launches(read.items())), tuple(expected), crowding)


def write_crowding(calibration: Path, crowding: Crowding) -> None:
    """Keep the slowdown that a calibration measured beside its benchmarks, for later estimates from them."""
    write_json(calibration / CROWDING, asdict(crowding))


def _read_crowding(calibration: Path) -> Crowding | None:
    if (points := read_json(calibration / CROWDING)) is None:
        return None
    try:
        return record_of(Crowding, points)
    except ValueError:
        return None  # an estimate does not need it


def of_runs(runs: Sequence[RunTimes]) -> History:
    """Return the history of runs of one campaign."""
    alive = Alive(run.span for run in runs if run.span is not None)
    return History(tuple(_beside(run, alive) for run in runs), (), ())


def _label(run_directory: Path) -> str:
    return run_directory.name.rpartition("_s")[0]


def _run_directories(directory: Path, manifest: Manifest | None) -> Iterator[Path]:
    if is_single_run(directory):
        yield directory
        return
    files = CampaignFiles(directory)
    if manifest is not None:
        yield from (files.runs / Path(entry.run_id).name for entry in manifest.runs)
    elif files.runs.is_dir():
        yield from sorted(files.runs.iterdir())


def _beside(run: RunTimes, alive: Alive) -> RunTimes:
    if run.span is None or not alive.is_known:
        return run
    return replace(run, alive=alive.between(*run.span))


def _at_a_time(manifest: Manifest | None) -> int:
    return min(manifest.workers, len(manifest.runs)) if manifest is not None else 0


def _launches(manifests: Iterable[tuple[Path, Manifest]]) -> Iterator[Launches]:
    """Iterate over how long workers took from a free slot to a first record, on average of a campaign.

    Staggered launches also wait for each other, so only the first one counts.
    """
    for path, manifest in manifests:
        if any(run.attempts > 1 for run in manifest.runs):
            continue
        starts = sorted(start for run in manifest.runs if (start := posix_s(run.started_at)) is not None)
        ends = sorted(end for run in manifest.runs if (end := posix_s(run.ended_at)) is not None)
        free = [posix_s(manifest.started_at)] * (_at_a_time(manifest) or len(starts)) + list(ends)
        pairs = list(zip(starts, free, strict=False))[: 1 if manifest.stagger_s else None]
        waits = [max(0.0, start - since) for start, since in pairs if since is not None]
        if waits:
            alive = 1 if manifest.stagger_s else max(1, _at_a_time(manifest))
            yield Launches(known_origin(CampaignFiles(path))[0].launcher, statistics.fmean(waits), alive)
