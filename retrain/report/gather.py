"""Reads a campaign's directory: all data for reports and comparisons.

Unreadable files become a run's message or one of the campaign's problems, and the rest is still
reported. Texts are safe to print on one line; writers of HTML must escape them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retrain.config.digest import is_edited
from retrain.errors import ConfigError, RecordsError
from retrain.plan.provenance import known_origin
from retrain.records.attempts import Attempt
from retrain.records.files import read_small, readable
from retrain.records.layout import (
    CampaignFiles,
    RunFiles,
    find_campaigns,
    is_campaign,
    is_single_run,
    recorded_tables,
)
from retrain.records.manifest import Manifest, RunEntry
from retrain.records.run_row import RunRow, row_of_inspected, unreadable_row
from retrain.records.run_state import UNREADABLE, Inspection, RunState, inspect_run
from retrain.records.text import plain
from retrain.report.columns import NO_ROWS, Columns, read_columns
from retrain.status.survey import manifest_of, runs_of

SHOWN_CAMPAIGNS = 5
_NAME_LIMIT = 200


@dataclass(frozen=True, kw_only=True)
class RunHistory(RunRow):
    """A run's row, and all that its directory holds of it."""

    attempts: tuple[Attempt, ...]
    columns: Columns
    result: Mapping[str, Any]  # from done.json; empty unless done
    config: Mapping[str, Any]  # tables of run.toml; empty if unreadable or edited
    directory: Path

    @property
    def has_failed(self) -> bool:
        """Whether it failed and will not continue by itself."""
        return self.ended_badly and self.state != RunState.DIED

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
    problems: tuple[str, ...]

    @property
    def conditions(self) -> tuple[str, ...]:
        """Labels in the campaign's order."""
        return tuple(dict.fromkeys(run.condition for run in self.runs))

    def of_condition(self, condition: str) -> tuple[RunHistory, ...]:
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
        newest = reversed(found[-SHOWN_CAMPAIGNS:])
        names = "\n".join(f"  {plain(str(path), _NAME_LIMIT)}" for path in newest)
        raise ConfigError(
            f"{directory}: contains {len(found)} campaigns; specify one, for example the newest:\n{names}"
        )
    return _read(found[0])


def gather_all(directory: Path, *, with_rows: bool = True) -> tuple[CampaignRecord, ...]:
    """Read every campaign and single run in a directory, or the directory's own; metrics only `with_rows`.

    Raises:
        RecordsError: there is no such directory.
    """
    return tuple(_read(path, with_rows=with_rows) for path in find_campaigns(directory))


def left_out(runs: Iterable[RunRow]) -> list[str]:
    """List the runs with damaged records and the reason: they are excluded from all results."""
    return [f"{run.run_id} is left out: {run.message}" for run in runs if run.state == UNREADABLE]


def _read(directory: Path, *, with_rows: bool = True) -> CampaignRecord:
    files = CampaignFiles(directory)
    problems: list[str] = []
    manifest = manifest_of(_with_manifest(files), problems)
    planned = runs_of(files, manifest, problems)
    runs = [_run(files_of, entry, with_rows=with_rows) for files_of, entry in planned]
    for i, run in enumerate(runs):
        if is_edited(run.config):
            problems.append(f"{run.run_id}: run.toml was changed after it was planned, and is left out")
            runs[i] = replace(run, config={})
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
        overrides=tuple(map(plain, known_origin(files)[0].overrides)),
        toml=(readable(read_small, given) or b"").decode("utf-8-sig", "replace"),
        runs=tuple(runs),
        problems=tuple(plain(problem, 500) for problem in problems),
    )


def _with_manifest(files: CampaignFiles) -> CampaignFiles:
    """Return the files with the manifest of a directory: a run of a campaign is in the campaign's."""
    above = files.directory.resolve().parent
    is_part = above.name == "runs" and is_campaign(above.parent) and not files.manifest.exists()
    return CampaignFiles(above.parent) if is_part else files


def _run(files: RunFiles, entry: RunEntry, *, with_rows: bool) -> RunHistory:
    seen, columns = Inspection(RunState.PENDING, (), None), NO_ROWS
    try:
        seen = inspect_run(files, entry.config_hash)
        row = row_of_inspected(entry, files, seen)
        columns = read_columns(files.metrics) if with_rows else NO_ROWS
    except RecordsError as error:
        row = unreadable_row(entry, error)
    return RunHistory(
        **vars(row),
        attempts=seen.attempts,
        columns=columns,
        result=seen.done.result if seen.done else {},
        config=recorded_tables(files),
        directory=files.directory,
    )
