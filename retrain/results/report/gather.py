"""Reads a campaign's directory: all data for reports and comparisons.

Unreadable files become a run's message or one of the campaign's problems, and the rest is still
reported. Texts are safe to print on one line; writers of HTML must escape them. Rows become columns, small
enough in memory for a campaign of a thousand runs.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
import tomllib
from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import repeat
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from retrain.base.clock import posix_s
from retrain.base.errors import ConfigError, RecordsError
from retrain.base.rollouts import Floats
from retrain.config.digest import is_edited
from retrain.config.keys import Tables
from retrain.records.decision import unscored_key
from retrain.records.files import read_small, readable
from retrain.records.layout import (
    CampaignFiles,
    RunFiles,
    campaign_of,
    find_campaigns,
    instead_of,
    is_single_run,
    unread_campaigns,
)
from retrain.records.lines import GrowingFile, is_count, measured, parse_line, read_lines
from retrain.records.manifest import Manifest, read_manifest
from retrain.records.metrics import flat_step
from retrain.records.provenance import known_origin
from retrain.records.row_parts import Columns
from retrain.records.run_row import UNTOUCHED, RunEntry, RunRow, read_run, signs_of, unreadable_row
from retrain.records.run_state import UNREADABLE, Attempt, RunState, Start, read_start, rung_of
from retrain.records.rungs import as_decided
from retrain.records.text import plain
from retrain.records.windows import AXES, STEPS, amounts
from retrain.results.status import runs_of

MOST_METRICS = 200  # our rows have at most sixty; a damaged file must not make millions of columns
NO_TEXTS: Mapping[str, object] = {}
NOT_METRICS = frozenset({"step", "seed", "attempt"})
TEXTS = ("bp_regime", "engine_server", "engine_crash")  # what else a row is read for
_NAME_LIMIT = 200
# Runs that differ in their seed only have run.tomls that differ in three values: the seed, the run's id and
# the digest of the configuration. One that is equal in all other bytes to one that was parsed has its tables.
_TEXT = r'"([^"\\\x00-\x1f\x7f]*)"\n'  # which stands for itself
_BY_SEED = tuple(
    re.compile(rf"^{line}", re.MULTILINE)
    for line in (
        r"\[training\]\nseed = (0|[1-9]\d{0,15})\n",
        rf"\[run\]\nrun_id = {_TEXT}",
        rf"config_hash = {_TEXT}",
    )
)
_LONG_TEXTS = ('"""', "'''")  # may hold lines that look like keys


@dataclass(frozen=True)
class StepColumns:
    """One run's rows, each step once."""

    steps: NDArray[np.int64]  # ascending, shape (rows,)
    ends_s: Floats  # when each step's row was written, in Unix seconds; NaN if unknown
    metrics: dict[str, Floats]  # name -> values, shape (rows,); NaN where a row lacks it
    texts: dict[str, tuple[str, ...]]  # of `TEXTS` that have any -> of each row; "" if none
    skipped_lines: int  # torn, or not rows
    _reached: dict[str, array[float] | None] = field(default_factory=dict, repr=False, compare=False)

    def metric(self, name: str) -> Floats:
        """Return a metric's values, all NaN if no row has it."""
        values = self.metrics.get(name)
        return np.full(len(self.steps), np.nan) if values is None else values

    def text(self, name: str) -> tuple[str, ...]:
        """Return one of `TEXTS` of each row."""
        return self.texts.get(name) or ("",) * len(self.steps)

    def reached(self, per: str) -> Sequence[float] | None:
        """Return how much of an axis the run has come to after each row; None if a row does not tell."""
        if per == STEPS:
            return cast(Sequence[float], self.steps)
        if per not in self._reached:
            ends = amounts((), [self.metric(key).tolist() for key in AXES[per].keys], per)
            self._reached[per] = None if ends is None else array("d", ends)
        return self._reached[per]


NO_ROWS = StepColumns(np.empty(0, dtype=np.int64), np.empty(0), {}, {}, 0)


@dataclass(frozen=True, kw_only=True)
class RunHistory(RunRow):
    """A run's row, and all that its directory holds of it."""

    attempts: tuple[Attempt, ...]
    columns: StepColumns
    result: Columns  # from done.json; empty unless done
    config: Tables  # tables of run.toml; empty if unreadable or edited
    directory: Path
    start: Start = field(default_factory=Start)  # its evaluations before the first step

    @property
    def has_failed(self) -> bool:
        """Whether it failed and will not continue by itself."""
        return self.ended_badly and self.state != RunState.DIED

    @property
    def was_tried_again(self) -> bool:
        """Whether it needed several attempts; to wait at a rung of a search is none."""
        return sum(not rung_of(attempt.message) for attempt in self.attempts) > 1

    @property
    def last_step(self) -> int:
        """The last step with a row; 0 without rows."""
        return int(self.columns.steps[-1]) if len(self.columns.steps) else 0


@dataclass(frozen=True)
class CampaignRecord:
    """One campaign, or one single run."""

    id: str
    directory: Path
    manifest: Manifest | None
    overrides: tuple[str, ...]  # --set, verbatim
    toml: str  # campaign.toml, or run.toml of a single run; verbatim
    runs: tuple[RunHistory, ...]
    unread: tuple[str, ...]  # files that cannot be read, and what is left out of all results for that
    problems: tuple[str, ...]  # these, and what is wrong with runs

    @property
    def conditions(self) -> tuple[str, ...]:
        """Labels in the campaign's order."""
        return tuple(dict.fromkeys(run.condition for run in self.runs))


def gather(directory: Path, metrics: Collection[str] | None = None) -> CampaignRecord:
    """Read a campaign or run, given its directory or one that contains no other.

    With `metrics`, rows are read for these alone: without times and texts. Raises RecordsError if its runs
    cannot be listed.
    """
    directories = find_campaigns(directory)
    if len(directories) != 1:
        raise ConfigError(f"{directory}: {instead_of(directory)}")
    campaign = _read(directories[0], unread_campaigns(directory), metrics=metrics)
    _require_runs(campaign)
    return campaign


def gather_all(directory: Path, *, with_rows: bool = True) -> tuple[CampaignRecord, ...]:
    """Read every campaign and single run in a directory, or the directory's own; metrics only `with_rows`.

    Raises RecordsError if the runs of none can be listed.
    """
    campaigns = tuple(_read(path, with_rows=with_rows) for path in find_campaigns(directory))
    _require_runs(*campaigns)
    return campaigns


def _require_runs(*campaigns: CampaignRecord) -> None:
    problems = [problem for campaign in campaigns for problem in campaign.problems]
    if problems and not any(campaign.runs for campaign in campaigns):
        raise RecordsError("\n".join(problems))


def left_out(runs: Iterable[RunRow]) -> list[str]:
    """List the runs with damaged records and the reason: they are excluded from all results."""
    return [f"{run.name} is left out: {run.message}" for run in runs if run.state == UNREADABLE]


def _read(
    directory: Path,
    beside: Sequence[str] = (),
    *,
    with_rows: bool = True,
    metrics: Collection[str] | None = None,
) -> CampaignRecord:
    files = CampaignFiles(directory)
    problems = [*beside]
    manifest = readable(read_manifest, campaign_of(directory.resolve()).manifest, problems.append)
    if metrics is not None and manifest and manifest.decision:
        metrics = {*metrics, manifest.decision.metric, unscored_key(manifest.decision.metric)}
    planned = runs_of(files, manifest, problems)
    read = partial(read_columns, metrics=metrics) if with_rows else None
    tables, runs = RunTables(), list[RunHistory]()
    for run_files, entry in planned:
        config, is_edited = tables.of(run_files)
        run = _run(run_files, entry, manifest, read, {} if is_edited else config)
        if is_edited:
            problems.append(f"{run.name}: run.toml was changed after it was planned, and is left out")
        runs.append(run)
    problems += left_out(runs)
    toml_file = RunFiles(directory).run_toml if is_single_run(directory) else files.campaign_toml
    return CampaignRecord(
        id=plain(directory.resolve().name, _NAME_LIMIT),
        directory=directory,
        manifest=manifest,
        overrides=tuple(map(plain, known_origin(files)[0].overrides)),
        toml=(readable(read_small, toml_file) or b"").decode("utf-8-sig", "replace"),
        runs=tuple(runs),
        unread=tuple(plain(problem, 500) for problem in problems),
        problems=tuple(plain(problem, 500) for problem in (*problems, *_problems_of(runs))),
    )


def _problems_of(runs: Sequence[RunHistory]) -> Iterator[str]:
    for signs in signs_of(runs):
        yield from (f"{names}: {sign}" for names, sign in signs.items())
    for run in runs:
        if skipped := run.columns.skipped_lines:
            yield f"{run.name}: {skipped} lines of metrics.jsonl could not be read and are left out"


def _run(
    files: RunFiles,
    entry: RunEntry,
    manifest: Manifest | None,
    read: Callable[[Path], StepColumns] | None,
    config: Tables,
) -> RunHistory:
    seen, columns = UNTOUCHED, NO_ROWS
    try:
        reading = read_run(entry, files, entry.reading, is_checked=True)
        seen, row = reading.seen, reading.row
        if manifest is not None:
            row = as_decided(row, manifest.searched, manifest.decision)
        columns = read(files.metrics) if read else NO_ROWS
    except RecordsError as error:
        row = unreadable_row(entry, error)
    return RunHistory(
        **vars(row),
        attempts=seen.attempts,
        columns=columns,
        result=seen.done.result if seen.done else {},
        config=config,
        directory=files.directory,
        start=read_start(files) if seen.attempts else Start(),
    )


def read_columns(path: Path, metrics: Collection[str] | None = None) -> StepColumns:
    """Read a file of rows, such as metrics.jsonl or warmup.jsonl; without rows, there are no columns.

    With `metrics`, only these are read: without times and texts.
    """
    reading, has_more = _Reading(), metrics is None
    skipped_lines = sum(not reading.add_line(line, metrics, has_more=has_more) for line in read_lines(path))
    return reading.columns(skipped_lines)


class GrowingColumns:
    """The columns of a file of rows that another process appends to; only what was appended is read."""

    def __init__(self, path: Path, metrics: Collection[str], *, has_more: bool = False) -> None:
        """Read these metrics; times and texts as well if it `has_more`, which takes ten times as long."""
        self._file, self._metrics, self._has_more = GrowingFile(path, is_sampled=False), metrics, has_more
        self._reading, self._skipped_lines = _Reading(), 0
        self.columns = NO_ROWS

    def refresh(self) -> StepColumns:
        """Return the columns as they are now, the same object if the file has not changed."""
        growth = self._file.read_growth()
        if growth is None:
            return self.columns
        if growth.begins_anew:
            self._reading, self._skipped_lines = _Reading(), 0
        for line in growth.lines:
            is_row = self._reading.add_line(line, self._metrics, has_more=self._has_more)
            self._skipped_lines += not is_row
        self.columns = self._reading.columns(self._skipped_lines)
        return self.columns


@cache
def _pattern(names: frozenset[str]) -> re.Pattern[bytes] | None:
    """Return what finds the numbers of these names in a row that holds no tables; None for unusual names."""
    if any(json.dumps(name) != f'"{name}"' for name in names):
        return None
    keys = "|".join(map(re.escape, sorted(names)))  # within a text, quotes are escaped
    return re.compile(rf', "({keys})": (-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)(?=[,}}])'.encode())


@dataclass
class _Reading:
    """Rows read so far: as dictionaries they would need ten times the memory."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    ends_s: array[float] = field(default_factory=lambda: array("d"))
    texts: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in TEXTS})
    metrics: dict[str, array[float]] = field(default_factory=dict)  # shorter than the steps: unknown since

    def add(
        self,
        step: int,
        values: Iterable[tuple[str, float]],
        end_s: float = math.nan,
        texts: Mapping[str, object] = NO_TEXTS,
    ) -> None:
        """Add a row; it replaces all rows from its step on."""
        rows = len(self.steps)
        if rows and step <= self.steps[-1]:
            rows = bisect_left(self.steps, step)
            columns: list[MutableSequence[Any]] = [self.steps, self.ends_s, *self.texts.values()]
            for column in (*columns, *self.metrics.values()):
                del column[rows:]
        self.steps.append(step)
        self.ends_s.append(end_s)
        for name, column in self.texts.items() if texts else ():
            column.append(sys.intern(str(texts.get(name) or "")))
        for name, value in values:
            metric = self.metrics.get(name)
            if metric is None:
                if value != value or name in NOT_METRICS or len(self.metrics) >= MOST_METRICS:
                    continue
                metric = self.metrics[sys.intern(name)] = array("d")
            if len(metric) < rows:
                metric.extend(repeat(math.nan, rows - len(metric)))
            metric.append(value)

    def add_line(self, line: bytes, metrics: Collection[str] | None, *, has_more: bool) -> bool:
        """Add a line's numbers, all or those of `metrics`, and times and texts if it `has_more`.

        Return whether it is a row.
        """
        if metrics is not None and not has_more and (step := flat_step(line)) is not None:
            pattern = _pattern(frozenset(metrics))
            if pattern is not None:  # a tenth of the time that parsing takes
                matches = pattern.findall(line)
                self.add(step, ((name.decode(), measured(float(text))) for name, text in matches))
                return True
        row = parse_line(line)
        if row is None or not is_count(step := row.get("step")):
            return False
        names = row if metrics is None else [name for name in metrics if name in row]
        values = ((name, measured(row[name])) for name in names)
        if has_more:
            self.add(step, values, unix_seconds(row.get("timestamp")), row)
        else:
            self.add(step, values)
        return True

    def columns(self, skipped_lines: int) -> StepColumns:
        """Return the rows so far as columns, without metrics that only replaced rows had."""
        metrics = {}
        for name, metric in self.metrics.items():
            values = np.full(len(self.steps), math.nan)
            values[: len(metric)] = metric
            if not np.isnan(values).all():
                is_constant = (values == values[0]).all()  # as many metrics are, which then need no room
                metrics[name] = np.broadcast_to(values[0], values.shape) if is_constant else values
        return StepColumns(
            np.array(self.steps, dtype=np.int64),
            np.array(self.ends_s, dtype=np.float64),
            metrics,
            {name: tuple(texts) for name, texts in self.texts.items() if any(texts)},
            skipped_lines,
        )


class RunTables:
    """The tables of each run.toml; of runs that differ in their seed only, one is parsed."""

    def __init__(self) -> None:
        self._parsed: dict[bytes, Tables] = {}  # by a digest of the common text

    def of(self, files: RunFiles) -> tuple[Tables, bool]:
        """Return a run's tables, empty if they cannot be read, and whether they were edited."""
        try:
            return self._parse((readable(read_small, files.run_toml) or b"").decode("utf-8-sig"))
        except (ValueError, RecursionError):
            return {}, False

    def _parse(self, text: str) -> tuple[Tables, bool]:
        places = [place for line in _BY_SEED for place in line.finditer(text)]
        if len(places) != len(_BY_SEED) or any(quotes in text for quotes in _LONG_TEXTS):
            tables = tomllib.loads(text)
            return tables, is_edited(tables)
        (seed, run_id, config_hash), common = (place[1] for place in places), text
        for place in reversed(places):
            common = common[: place.start(1)] + common[place.end(1) :]
        key = hashlib.sha256(common.encode()).digest()
        if key not in self._parsed:
            self._parsed[key] = tomllib.loads(text)
        first = self._parsed[key]
        tables = {
            **first,
            "training": {**first["training"], "seed": int(seed)},
            "run": {**first["run"], "run_id": run_id, "config_hash": config_hash},
        }
        return tables, is_edited(tables)


def unix_seconds(timestamp: object) -> float:
    """Return a timestamp of the records in Unix seconds; NaN if it is invalid."""
    seconds = posix_s(timestamp)
    return math.nan if seconds is None else seconds
