"""Reads a campaign's directory: all data for reports and comparisons.

Unreadable files become a run's message or one of the campaign's problems, and the rest is still
reported. Texts are safe to print on one line; writers of HTML must escape them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retrain.config.digest import is_edited
from retrain.errors import ConfigError, RecordsError
from retrain.plan.provenance import entries_without_manifest, known_origin
from retrain.records.attempts import Attempt
from retrain.records.files import read_small
from retrain.records.layout import CampaignFiles, RunFiles, find_campaigns, is_campaign, is_single_run
from retrain.records.manifest import Manifest, RunEntry, entry_from_name, read_manifest
from retrain.records.run_state import UNREADABLE, RunState, inspect_run
from retrain.records.text import plain
from retrain.report.columns import NO_ROWS, Columns, read_columns

ALIVE = (RunState.DONE, RunState.RUNNING, RunState.INTERRUPTED, RunState.DIED, RunState.PENDING)
SHOWN_CAMPAIGNS = 5
_NAME_LIMIT = 200


@dataclass(frozen=True)
class RunRecord:
    """One run: its state and every row."""

    run_id: str
    condition: str
    seed: int | None  # None if unknown
    state: str  # a RunState, or UNREADABLE
    max_steps: int | None
    attempts: tuple[Attempt, ...]
    columns: Columns
    result: Mapping[str, Any]  # from done.json; empty unless done
    config: Mapping[str, Any]  # tables of run.toml; empty if unreadable or edited
    message: str  # why it failed or is unreadable
    directory: Path

    @property
    def is_done(self) -> bool:
        """Whether it finished."""
        return self.state == RunState.DONE

    @property
    def has_failed(self) -> bool:
        """Whether it failed and will not continue by itself."""
        return self.state not in ALIVE

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
    runs: tuple[RunRecord, ...]
    problems: tuple[str, ...]

    @property
    def conditions(self) -> tuple[str, ...]:
        """Labels in the campaign's order."""
        return tuple(dict.fromkeys(run.condition for run in self.runs))

    def of_condition(self, condition: str) -> tuple[RunRecord, ...]:
        """Return a condition's runs."""
        return tuple(run for run in self.runs if run.condition == condition)


def gather(directory: Path) -> CampaignRecord:
    """Read a campaign or run, given its directory or one that contains no other.

    Raises:
        ConfigError: the directory contains none or several; lists the newest.
        RecordsError: there is no such directory.
    """
    found = find_campaigns(directory)
    if not found:
        raise ConfigError(f"{directory}: no campaigns yet; start one with `retrain FILE.toml`")
    if len(found) > 1:
        newest = sorted(found, key=lambda path: path.stat().st_mtime)[-SHOWN_CAMPAIGNS:]
        names = "\n".join(f"  {plain(str(path), _NAME_LIMIT)}" for path in reversed(newest))
        raise ConfigError(
            f"{directory}: contains {len(found)} campaigns; specify one, for example the newest:\n{names}"
        )
    return _read(found[0])


def gather_all(directory: Path, *, with_rows: bool = True) -> tuple[CampaignRecord, ...]:
    """Read every campaign and single run in a directory, or the directory's own campaign or run.

    Args:
        directory: of campaigns, or of one.
        with_rows: read the metrics too, and not only the states.

    Raises:
        RecordsError: there is no such directory.
    """
    return tuple(_read(path, with_rows=with_rows) for path in find_campaigns(directory))


def left_out(runs: Iterable[RunRecord]) -> list[str]:
    """List the runs with damaged records and the reason: they are excluded from all results."""
    return [f"{run.run_id} is left out: {run.message}" for run in runs if run.state == UNREADABLE]


def _read(directory: Path, *, with_rows: bool = True) -> CampaignRecord:
    files = CampaignFiles(directory)
    problems: list[str] = []
    manifest = _manifest(files, problems)
    planned = _planned(files, manifest, problems)
    runs = tuple(_run(files_of, entry, with_rows=with_rows) for files_of, entry in planned)
    edited = [run.run_id for run in runs if is_edited(run.config)]
    runs = tuple(replace(run, config={}) if run.run_id in edited else run for run in runs)
    problems += [f"{run_id}: run.toml was changed after it was planned, and is left out" for run_id in edited]
    problems += left_out(runs)
    problems += [
        f"{run.run_id}: {run.columns.skipped_lines} lines of metrics.jsonl could not be read and are left out"
        for run in runs
        if run.columns.skipped_lines
    ]
    given = RunFiles(directory).run_toml if is_single_run(directory) else files.campaign_toml
    return CampaignRecord(
        id=plain(directory.resolve().name, _NAME_LIMIT),
        directory=directory,
        manifest=manifest,
        overrides=_overrides(files),
        toml=_text(given),
        runs=runs,
        problems=tuple(plain(problem, 500) for problem in problems),
    )


def _manifest(files: CampaignFiles, problems: list[str]) -> Manifest | None:
    path = files.manifest
    above = files.directory.resolve().parent
    if not path.exists() and above.name == "runs" and is_campaign(above.parent):
        path = CampaignFiles(above.parent).manifest
    try:
        return read_manifest(path)
    except RecordsError as error:
        problems.append(str(error))
        return None


def _planned(
    files: CampaignFiles, manifest: Manifest | None, problems: list[str]
) -> list[tuple[RunFiles, RunEntry]]:
    try:
        entries = manifest.runs if manifest else entries_without_manifest(files)
        if is_single_run(files.directory):
            return [(RunFiles(files.directory), _own(entries, files.directory.resolve().name))]
        return [(files.run(entry.run_id), entry) for entry in entries]
    except RecordsError as error:
        problems.append(str(error))
        return []


def _own(entries: Sequence[RunEntry], name: str) -> RunEntry:
    """Return a single run's entry: its campaign's manifest has others too."""
    known = {entry.run_id: entry for entry in entries}
    return known.get(name, entries[0] if len(entries) == 1 else entry_from_name(name))


def _run(files: RunFiles, entry: RunEntry, *, with_rows: bool) -> RunRecord:
    config = _tables(files.run_toml)
    state, message, attempts, result = _became(files, entry)
    try:
        columns = read_columns(files.directory) if with_rows and state != UNREADABLE else NO_ROWS
    except RecordsError as error:
        columns, state, message = NO_ROWS, UNREADABLE, str(error)
    return RunRecord(
        run_id=plain(entry.run_id, _NAME_LIMIT),
        condition=plain(_condition(entry, config), _NAME_LIMIT),
        seed=_seed(entry, config),
        state=state,
        max_steps=entry.max_steps or _integer(config, "training", "max_steps"),
        attempts=attempts,
        columns=columns,
        result=result,
        config=config,
        message=plain(message, 500),
        directory=files.directory,
    )


def _became(files: RunFiles, entry: RunEntry) -> tuple[str, str, tuple[Attempt, ...], dict[str, Any]]:
    """Return state, message, attempts and result; an unreadable run has the reason as its message."""
    try:
        seen = inspect_run(files, entry.config_hash)
    except RecordsError as error:
        return UNREADABLE, str(error), (), {}
    result = dict(seen.done.result) if seen.done else {}
    message = seen.attempts[-1].message if seen.attempts and not seen.done else ""
    return str(seen.state), message, seen.attempts, result


def _condition(entry: RunEntry, config: Mapping[str, Any]) -> str:
    run = config.get("run")
    known = run.get("condition") if isinstance(run, dict) else None
    return known if isinstance(known, str) and known and entry.condition == entry.run_id else entry.condition


def _seed(entry: RunEntry, config: Mapping[str, Any]) -> int | None:
    return entry.seed if entry.seed >= 0 else _integer(config, "training", "seed")


def _integer(config: Mapping[str, Any], section: str, key: str) -> int | None:
    table = config.get(section)
    value = table.get(key) if isinstance(table, dict) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _tables(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_text(path))
    except (ValueError, RecursionError):
        return {}


def _overrides(files: CampaignFiles) -> tuple[str, ...]:
    return tuple(plain(one) for one in known_origin(files)[0].overrides)


def _text(path: Path) -> str:
    try:
        return (read_small(path) or b"").decode("utf-8-sig", "replace")
    except RecordsError:
        return ""
