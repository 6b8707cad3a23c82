"""Reads a log directory: its campaigns, each with its runs."""

from __future__ import annotations

from pathlib import Path

from retrain.errors import RecordsError
from retrain.locks.held import is_held
from retrain.plan.provenance import entries_without_manifest
from retrain.records.layout import (
    CampaignFiles,
    RunFiles,
    campaign_of,
    find_campaigns,
    is_single_run,
)
from retrain.records.manifest import Manifest, RunEntry, entry_from_name, read_manifest
from retrain.records.run_row import RunRow, read_row, unreadable_row
from retrain.records.run_state import UNREADABLE
from retrain.records.settled import is_still
from retrain.records.text import as_typed, plain
from retrain.status.rows import (
    CampaignStatus,
    PermitHolder,
    PermitStatus,
    campaign_state,
    summarize,
    time_left,
    typical_step_time,
)

_NAME_LIMIT = 120
_LONGEST_COMMAND = 4000


def survey(log_dir: Path) -> tuple[CampaignStatus, ...]:
    """Read all campaigns and single runs in a directory, or the directory's own campaign or run.

    Files that cannot be read are reported in a run's message or a campaign's problem.

    Returns:
        By directory name; empty if nothing there is a campaign.

    Raises:
        RecordsError: there is no such directory, or nothing in it can be read.
    """
    found = tuple(_campaign(directory) for directory in find_campaigns(log_dir))
    problems = [why for campaign in found if (why := _unreadable(campaign))]
    if found and len(problems) == len(found):
        raise RecordsError("\n".join(problems))
    return found


def _campaign(directory: Path) -> CampaignStatus:
    files = CampaignFiles(directory)
    problems: list[str] = []
    manifest = manifest_of(files, problems)
    runs = tuple(_run(where, entry) for where, entry in runs_of(files, manifest, problems))
    return campaign_row(files, manifest, runs, problems)


def campaign_row(
    files: CampaignFiles, manifest: Manifest | None, runs: tuple[RunRow, ...], problems: list[str]
) -> CampaignStatus:
    """Return a campaign's row from those of its runs, and from its lock and permits as they are now."""
    directory = files.directory
    is_supervised = _is_supervised(files, problems)
    state = campaign_state(runs, is_supervised=is_supervised)
    left = time_left(runs, manifest, is_supervised=is_supervised)
    return CampaignStatus(
        id=plain(directory.resolve().name, _NAME_LIMIT),
        name=plain(manifest.name if manifest else directory.resolve().name, _NAME_LIMIT),
        state=state,
        started_at=plain(manifest.started_at) if manifest else "",
        ended_at=plain(manifest.ended_at) if manifest else "",
        conditions=summarize(runs),
        seeds=tuple(dict.fromkeys(run.seed for run in runs)),
        runs=runs,
        step_time_s=typical_step_time(runs),
        steps_done=sum(run.step for run in runs),
        steps_total=_steps_total(runs),
        eta_s=left.p50_s if left else None,
        eta_p90_s=left.p90_s if left else None,
        expected=manifest.expected if manifest else None,
        permits=_permits(_permits_of(directory, manifest), problems),
        problem=plain("; ".join(problems), 500),
        is_supervised=is_supervised,
        resume_with=_resume_with(directory, state) if not is_supervised else "",
    )


def _resume_with(directory: Path, state: str) -> str:
    here = directory.absolute()
    if state not in ("running", "interrupted") or campaign_of(here).directory != here:
        return ""  # no work is left, or it is a run of a campaign, which is resumed as a whole
    return f"retrain resume {plain(as_typed(directory), _LONGEST_COMMAND)}"


def _steps_total(runs: tuple[RunRow, ...]) -> int | None:
    known = [run.max_steps for run in runs if run.max_steps is not None]
    return sum(known) if len(known) == len(runs) else None


def manifest_of(files: CampaignFiles, problems: list[str]) -> Manifest | None:
    """Read a campaign's manifest; what is wrong with it is added to `problems`."""
    try:
        return read_manifest(files.manifest)
    except RecordsError as error:
        problems.append(str(error))
        return None


def _run(files: RunFiles, entry: RunEntry) -> RunRow:
    """Read one run; if it was over when the manifest was written, only files changed since then."""
    try:
        if entry.settled is not None and is_still(entry.settled, files):
            return entry.settled.row
        return read_row(entry, files)
    except RecordsError as error:
        return unreadable_row(entry, error)


def runs_of(
    files: CampaignFiles, manifest: Manifest | None, problems: list[str]
) -> list[tuple[RunFiles, RunEntry]]:
    """List a campaign's runs as they were planned, by its manifest or its file.

    None if an id would lead out of the campaign or its directories cannot be listed: a problem then says so.
    """
    try:
        entries = manifest.runs if manifest else entries_without_manifest(files)
        if not is_single_run(files.directory):
            return [(files.run(entry.run_id), entry) for entry in entries]
    except RecordsError as error:
        problems.append(str(error))
        return []
    name = files.directory.resolve().name
    known = {entry.run_id: entry for entry in entries}  # the manifest of a run's campaign has others too
    own = known.get(name, entries[0] if len(entries) == 1 else entry_from_name(name))
    return [(RunFiles(files.directory), own)]


def _is_supervised(files: CampaignFiles, problems: list[str]) -> bool:
    try:
        return is_held(files.lock)
    except RecordsError as error:
        problems.append(str(error))
        return False


def _permits_of(directory: Path, manifest: Manifest | None) -> Path:
    if manifest and manifest.shared_permits:
        return Path(manifest.shared_permits[0])
    return campaign_of(directory).permits


def _permits(path: Path, problems: list[str]) -> PermitStatus | None:
    if not path.is_dir():
        return None
    from retrain.semaphore import FileSemaphore  # not at the top: only campaigns with permits need it
    from retrain.semaphore.adaptive import last_change

    try:
        seen, change = FileSemaphore.inspect(path), last_change(path)
    except (OSError, ValueError, RecordsError) as error:
        problems.append(f"{path}: {error}")
        return None
    holders = tuple(PermitHolder(h.pid, plain(h.host), plain(h.label), h.held_s) for h in seen.holders)
    why = f"{change.before} -> {change.permits}, {change.reason}" if change else ""
    return PermitStatus(seen.permits, holders, seen.waiting, plain(why, 200))


def _unreadable(campaign: CampaignStatus) -> str:
    """Return why nothing of a campaign can be read; "" if something can."""
    if any(run.state != UNREADABLE for run in campaign.runs):
        return ""
    return campaign.problem or next((run.message for run in campaign.runs), "")
