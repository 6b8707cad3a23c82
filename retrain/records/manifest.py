"""manifest.json: a campaign at a glance, rebuilt from its run directories on every change.

It holds what the directories do not (provenance and plan) and a copy of what they do.
Losing it loses no run.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from retrain.clock import utc_now
from retrain.distribution import version
from retrain.errors import DamagedRecordError, RecordsError
from retrain.records.files import read_json, record_of, write_atomic
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.run_row import PlannedRun as PlannedRun  # re-exported for callers that make a manifest
from retrain.records.run_state import UNREADABLE, RunState, inspect_run
from retrain.records.summary import Summary, from_json, marks_of, summarize, to_json

SCHEMA_VERSION = 2  # 1 had no `settled`
_GIT_TIMEOUT_S = 5.0  # a huge or remote work tree must not hold up a campaign


@dataclass(frozen=True)
class RunEntry(PlannedRun):
    """A planned run and its state."""

    state: str = RunState.PENDING  # or UNREADABLE
    attempts: int = 0
    started_at: str = ""
    ended_at: str = ""
    message: str = ""
    result: Mapping[str, Any] | None = None
    summary: Summary | None = None  # which readers may use without opening the run's files


@dataclass(frozen=True)
class GitState:
    """Commit of a work tree, and whether tracked files differ from it."""

    commit: str
    is_dirty: bool


@dataclass(frozen=True)
class Expectation:
    """Expected and actual duration of the whole campaign, in seconds."""

    p50_s: float
    p90_s: float
    made_after_s: float  # time since the campaign's start; 0 for an estimate from earlier campaigns
    made_from: str
    actual_s: float | None = None  # None until every run is done


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
    shared_cores: float = 0.0  # CPU cores shared by runs that keep one busy each; 0 if they do not
    expected: Expectation | None = None  # None while no step time is known


def new_manifest(
    name: str,
    config_hash: str,
    planned: Sequence[PlannedRun],
    where: Path,
    shared_permits: Sequence[str] = (),
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
        runs=tuple(RunEntry(**asdict(run)) for run in planned),
        shared_permits=tuple(shared_permits),
    )


def with_plan(manifest: Manifest, config_hash: str, planned: Sequence[PlannedRun]) -> Manifest:
    """Return a manifest with the runs of a plan, keeping its own facts and what is known of those runs."""
    known = {(run.run_id, run.config_hash): run for run in manifest.runs}  # of another config: not known
    entries = (known.get((run.run_id, run.config_hash)) or RunEntry(**asdict(run)) for run in planned)
    runs = tuple(replace(entry, **asdict(run)) for entry, run in zip(entries, planned, strict=True))
    return replace(manifest, config_hash=config_hash, runs=runs)


def refresh(manifest: Manifest, campaign: CampaignFiles, *, ended: bool = False) -> Manifest:
    """Read every run's directory again; the message of a run whose files cannot be read says so."""
    runs = tuple(look_at(entry, campaign.existing_run(entry.run_id)) for entry in manifest.runs)
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
    found = read_json(path)
    if found is None:
        return None
    version = found.get("schema_version")
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise RecordsError(
            f"{path}: has schema {version!r}, but this retrain reads up to {SCHEMA_VERSION}; upgrade retrain"
        )
    try:
        return _parse(found)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise DamagedRecordError(f"{path}: is no manifest ({error!r}); move it away and resume") from error


def _line(run: RunEntry) -> str:
    found = {**vars(run), "settled": to_json(run.summary) if run.summary else None}
    del found["summary"]
    return json.dumps(found, allow_nan=False)


def _entry(found: Mapping[str, Any]) -> RunEntry:
    planned = PlannedRun(found["run_id"], found["condition"], found["seed"], found["max_steps"])
    is_named = isinstance(planned.run_id, str) and isinstance(planned.condition, str)
    if not is_named or not isinstance(planned.seed, int):
        raise ValueError("a run without id, condition or seed")
    known = {name: value for name, value in found.items() if name != "settled"}
    return RunEntry(**known, summary=from_json(found.get("settled"), planned))


def _parse(found: dict[str, Any]) -> Manifest:
    git = found["git"]
    runs = tuple(map(_entry, found["runs"]))
    known = {field.name: found[field.name] for field in fields(Manifest) if field.default is MISSING}
    later = {
        "shared_permits": tuple(str(path) for path in found.get("shared_permits", ())),
        "workers": int(found.get("workers", 0)),
        "stagger_s": float(found.get("stagger_s", 0.0)),
        "shared_cores": float(found.get("shared_cores", 0.0)),
        "expected": _expectation(found["expected"]) if found.get("expected") else None,
    }
    return Manifest(**known | later | {"git": GitState(**git) if git else None, "runs": runs})


def _expectation(found: Mapping[str, Any]) -> Expectation:
    expected = record_of(Expectation, found)
    times = (expected.p50_s, expected.p90_s, expected.made_after_s, expected.actual_s or 0.0)
    if not all(math.isfinite(time) and time >= 0 for time in times):
        raise ValueError("an expectation that is no time")
    return expected


def entry_from_name(run_id: str) -> RunEntry:
    """Return an entry read from a run's name `<condition>_s<seed>`, for a campaign without a manifest."""
    condition, mark, seed = run_id.rpartition("_s")
    if mark and seed.isascii() and seed.isdigit() and len(seed) <= 18:
        return RunEntry(run_id, condition, int(seed), max_steps=0)
    return RunEntry(run_id, run_id, -1, max_steps=0)


def look_at(entry: RunEntry, files: RunFiles) -> RunEntry:
    """Read one run's directory again; if its files cannot be read, state and message say so."""
    try:
        marks = marks_of(files)
        seen = inspect_run(files, entry.config_hash)
        summary = summarize(entry, files, seen, marks, entry.summary)
    except RecordsError as error:
        return replace(entry, state=UNREADABLE, message=str(error), summary=None)
    last = seen.attempts[-1] if seen.attempts else None
    return replace(
        entry,
        state=seen.state,
        attempts=len(seen.attempts),
        started_at=seen.attempts[0].started_at if seen.attempts else "",
        ended_at=(last.ended_at or "") if last else "",
        message=last.message if last else "",
        result=seen.done.result if seen.done else None,
        summary=summary,
    )


def git_state(directory: Path) -> GitState | None:
    """Return a directory's git state; None outside a repository, without git, or if git takes too long."""
    commit = _git(directory, "rev-parse", "--verify", "HEAD")
    changes = _git(directory, "status", "--porcelain", "--untracked-files=no") if commit else None
    return GitState(commit.strip(), bool(changes.strip())) if commit and changes is not None else None


def _git(directory: Path, *arguments: str) -> str | None:
    import subprocess  # not at the top: costs 8 ms, and readers of a manifest never need it

    # No optional locks: reading a repository must not block a commit.
    command = ["git", "--no-optional-locks", "-C", str(directory), *arguments]
    try:
        asked = subprocess.run(
            command,
            capture_output=True,
            check=False,
            timeout=_GIT_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            encoding="utf-8",
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return asked.stdout if asked.returncode == 0 else None
