"""manifest.json: a campaign at a glance, rebuilt from its run directories on every change.

It holds what the directories do not, provenance and plan, and copies what they do: losing it loses no run.

It has the row of a run that is over, so that `status` need not open the run's files. A row is valid while the
sizes and modification times of three files are unchanged: any change of a run's state changes attempts.jsonl,
to which a worker writes first, or done.json; the figures are from metrics.jsonl.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from retrain.base.clock import utc_now
from retrain.base.distribution import version
from retrain.base.errors import DamagedRecordError, RecordsError, may_pass
from retrain.records.decision import Decision
from retrain.records.files import read_json, record_of, write_atomic
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.lines import Mark, mark_of
from retrain.records.run_row import Pace, RunEntry, RunReading, is_still_done, read_run, row_of
from retrain.records.run_state import UNREADABLE
from retrain.records.rungs import Searched

SCHEMA_VERSION = 2  # 1 had no `settled`

PACE = tuple(column.name for column in fields(Pace))
_COMMIT = re.compile(r"^# branch\.oid ([0-9a-f]+)$", re.MULTILINE)
GIT_TIMEOUT_S = 5.0  # a huge or remote work tree must not hold up a campaign


@dataclass(frozen=True)
class Expectation:
    """Expected and actual duration of the whole campaign, in seconds."""

    p50_s: float
    p90_s: float
    made_after_s: float  # time since the campaign's start; 0 for an estimate from earlier campaigns
    made_from: str
    actual_s: float | None = None  # None until every run is done

    def __post_init__(self) -> None:
        times = (self.p50_s, self.p90_s, self.made_after_s, self.actual_s or 0.0)
        if not all(math.isfinite(time) and time >= 0 for time in times):
            raise ValueError("an expectation that is no time")


@dataclass(frozen=True)
class GitState:
    """State of a work tree."""

    commit: str
    is_dirty: bool  # whether tracked files differ from it

    def __str__(self) -> str:
        return f"{self.commit} (with uncommitted changes)" if self.is_dirty else self.commit


@dataclass(frozen=True)
class Manifest:
    """Provenance and plan of a campaign, and the state of each run."""

    schema_version: int
    name: str
    config_hash: str
    package_version: str
    git: GitState | None
    host: str
    python: str
    started_at: str
    ended_at: str  # "" while it runs
    runs: tuple[RunEntry, ...]
    shared_permits: tuple[str, ...] = ()  # directories of permits that other campaigns use too
    workers: int = 0  # runs at a time; 0 if not known
    stagger_s: float = 0.0  # least time between two launches
    shared_cores: float = 0.0  # number of runs that have cores of their own; 0 if they share none
    searched: Searched | None = None  # what `[campaign.search]` has found; None without that table
    decision: Decision | None = None  # what `[decision]` has found; None without that table
    budget_usd: float | None = None  # `[budget].usd`
    added_seeds: int = 0  # by the user, after the campaign had begun
    adapters: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # of conditions: their start
    expected: Expectation | None = None  # None while no step time is known
    exit_code: int | None = None  # of the orchestrator; None while it lives, or if it was killed


def new_manifest(
    name: str, config_hash: str, planned: Sequence[RunEntry], where: Path, shared_permits: Sequence[str] = ()
) -> Manifest:
    """Return a new manifest: all runs pending, provenance as of now, git state of the directory `where`."""
    return Manifest(
        schema_version=SCHEMA_VERSION,
        name=name,
        config_hash=config_hash,
        package_version=version(),
        git=git_state(where),
        host=os.uname().nodename,
        python=sys.version.partition(" ")[0],
        started_at=utc_now(),
        ended_at="",
        runs=tuple(planned),
        shared_permits=tuple(shared_permits),
    )


def with_plan(manifest: Manifest, config_hash: str, planned: Sequence[RunEntry]) -> Manifest:
    """Return a manifest with the runs of a plan, keeping its own facts and what is known of those runs.

    A forecast is not kept if they are others now, or have other steps.
    """
    known = {(run.run_id, run.config_hash): run for run in manifest.runs}  # of another config: not known
    entries = (known.get((run.run_id, run.config_hash), run) for run in planned)
    runs = tuple(
        entry
        if (entry.condition, entry.seed, entry.max_steps) == (run.condition, run.seed, run.max_steps)
        else replace(entry, condition=run.condition, seed=run.seed, max_steps=run.max_steps)
        for entry, run in zip(entries, planned, strict=True)
    )
    before, now = ({run.run_id: run.max_steps for run in them} for them in (manifest.runs, runs))
    expected = manifest.expected if now == before else None
    return replace(manifest, config_hash=config_hash, runs=runs, expected=expected)


def refresh(manifest: Manifest, campaign: CampaignFiles, *, ended: bool = False) -> Manifest:
    """Read every run's directory again; the message of a run whose files cannot be read says so."""
    runs = tuple(updated_entry(entry, campaign.existing_run(entry.run_id)) for entry in manifest.runs)
    return replace(manifest, runs=runs, ended_at=utc_now() if ended else "")


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Replace manifest.json."""
    head = asdict(replace(manifest, schema_version=SCHEMA_VERSION, runs=()))
    del head["runs"]
    runs = ",\n".join(map(_line, manifest.runs))  # one line each: indented output takes ten times as long
    rest = json.dumps(head, indent=1, allow_nan=False).removesuffix("\n}")
    write_atomic(path, f'{rest},\n "runs": [\n{runs}\n ]\n}}\n')


def read_manifest(path: Path) -> Manifest | None:
    """Read manifest.json; None if it does not exist. After a DamagedRecordError no run is lost."""
    record = read_json(path)
    if record is None:
        return None
    if isinstance(version := record.get("schema_version"), int) and version > SCHEMA_VERSION:
        raise RecordsError(
            f"{path}: has schema {version!r}, but this retrain reads up to {SCHEMA_VERSION}; upgrade retrain"
        )
    try:
        runs = tuple(map(_entry, record["runs"]))  # there may be 100,000
        return replace(record_of(Manifest, record | {"runs": ()}), runs=runs)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise DamagedRecordError(f"{path}: is not a manifest ({error!r}); move it away and resume") from error


@dataclass(frozen=True)
class KnownManifest:
    """manifest.json as it was read, to be handed on."""

    manifest: Manifest | None  # None: there is none, or none that can be read
    mark: Mark | None
    is_damaged: bool = False


def known_manifest(path: Path, known: KnownManifest | None = None) -> KnownManifest:
    """Read manifest.json, unless it is still as it is `known`; a damaged one is as good as none."""
    mark = mark_of(str(path))
    if known is not None and known.mark == mark:
        return known
    try:
        return KnownManifest(read_manifest(path), mark)
    except DamagedRecordError:
        return KnownManifest(None, mark, is_damaged=True)


def _line(run: RunEntry) -> str:
    facts = dict(vars(run))
    del facts["reading"]
    settled = _settled(run.reading, facts) if run.reading else None
    return json.dumps(facts | {"settled": settled}, allow_nan=False)


def _settled(reading: RunReading, facts: Mapping[str, object]) -> dict[str, Any]:
    """Return a reading as JSON, without unknown values; its digest covers the rest of the entry too."""
    row, pace = vars(reading.row), reading.row.pace
    columns = {name: row[name] for name in row if name != "pace" and row[name] not in (None, "")}
    if pace is not None:
        columns["pace"] = [getattr(pace, name) for name in PACE]
    return {"marks": reading.marks, "summary": columns, "digest": _digest(facts, reading.marks, columns)}


def _reading(found: Any, facts: Mapping[str, Any], planned: RunEntry) -> RunReading | None:
    """Parse what `_settled` returned; None if it is anything else: the run's directory is then read."""
    try:
        is_intact = found["digest"] == _digest(facts, found["marks"], found["summary"])
        marks = tuple(mark and tuple(mark) for mark in found["marks"])
        row = {"max_steps": None} | found["summary"]
        if "pace" in row:
            steps, step_s, recent_s, *more = row["pace"]
            row["pace"] = Pace(steps, step_s, tuple(recent_s), *more)
        return RunReading(row_of(planned, row), marks=marks, is_over=True) if is_intact else None
    except (LookupError, TypeError, ValueError):
        return None


def _digest(facts: Mapping[str, object], marks: object, summary: object) -> str:
    return hashlib.sha256(json.dumps([facts, marks, summary]).encode()).hexdigest()[:16]


def _entry(found: Mapping[str, Any]) -> RunEntry:
    planned = RunEntry(found["run_id"], found["condition"], found["seed"], found["max_steps"])
    is_named = isinstance(planned.run_id, str) and isinstance(planned.condition, str)
    if not is_named or not isinstance(planned.seed, int):
        raise ValueError("a run without id, condition or seed")
    facts = {name: value for name, value in found.items() if name != "settled"}
    return RunEntry(**facts, reading=_reading(found.get("settled"), facts, planned))


def entry_from_name(run_id: str) -> RunEntry:
    """Return an entry read from a run's name `<condition>_s<seed>`, for a campaign without a manifest."""
    condition, mark, seed = run_id.rpartition("_s")
    if mark and seed.isascii() and seed.isdigit() and len(seed) <= 18:
        return RunEntry(run_id, condition, int(seed), max_steps=0)
    return RunEntry(run_id, run_id, -1, max_steps=0)


def updated_entry(entry: RunEntry, files: RunFiles, *, raises: bool = False) -> RunEntry:
    """Read one run's directory again; if its files cannot be read, state and message say so.

    With `raises`, it is a RecordsError instead if that may pass.
    """
    try:
        if is_still_done(entry, files):
            return entry
        reading = read_run(entry, files, entry.reading, is_checked=True, is_rolled_up=True)
    except RecordsError as error:
        if raises and may_pass(error):
            raise
        return replace(entry, state=UNREADABLE, message=str(error), reading=None)
    seen = reading.seen
    last = seen.attempts[-1] if seen.attempts else None
    return replace(
        entry,
        state=seen.state,
        attempts=len(seen.attempts),
        started_at=seen.attempts[0].started_at if seen.attempts else "",
        ended_at=(last.ended_at or "") if last else "",
        message=last.message if last else "",
        result=seen.done.result if seen.done else None,
        reading=RunReading(reading.row, marks=reading.marks, is_over=True) if reading.is_over else None,
    )


def git_state(directory: Path) -> GitState | None:
    """Return a directory's git state; None outside a repository, without git, or if git takes too long."""
    import subprocess  # not at the top: costs 8 ms, and readers of a manifest never need it

    # without optional locks, because reading a repository must not block a commit
    command = ["git", "--no-optional-locks", "-C", str(directory), "status", "--porcelain=v2", "--branch"]
    try:
        answer = subprocess.run(
            [*command, "--untracked-files=no"],
            capture_output=True,
            check=False,
            timeout=GIT_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    commit = _COMMIT.search(answer.stdout)  # none before the first commit
    is_dirty = any(not line.startswith("#") for line in answer.stdout.splitlines())
    return GitState(commit[1], is_dirty) if commit and answer.returncode == 0 else None
