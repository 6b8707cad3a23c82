"""Which log is meant, and whether anybody still writes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from retrain.errors import RecordsError
from retrain.records.layout import CampaignFiles, RunFiles, is_campaign, is_single_run
from retrain.records.locks import is_held
from retrain.records.text import plain

SHOWN_RUNS = 10


@dataclass(frozen=True)
class Log:
    """A file of output, and the locks of those who write it."""

    path: Path
    locks: tuple[Path, ...]

    def is_over(self) -> bool:
        """Tell whether nobody who could write to it lives."""
        return not any(is_held(lock) for lock in self.locks)


def find_log(directory: Path, run_id: str = "") -> Log:
    """Find the output of a run, given by its directory or by a campaign's and its id; else a campaign's own.

    Raises:
        RecordsError: there is no such run; names those that there are.
    """
    campaign = CampaignFiles(directory)
    if not is_campaign(directory):
        if run_id or not is_single_run(directory):
            raise RecordsError(f"{directory}: holds no campaign and no run; `retrain status` lists them")
        above = directory.parent.parent if directory.parent.name == "runs" else directory
        files = RunFiles(directory)
        return Log(files.output_log, (files.lock, CampaignFiles(above).lock))
    if run_id:
        files = campaign.run(run_id)
        if files.run_toml.is_file():
            return Log(files.output_log, (files.lock, campaign.lock))
        raise RecordsError(f"{directory}: has no run {run_id!r}; it has {_names(campaign)}")
    if not campaign.log.exists():
        raise RecordsError(f"{directory}: never ran in the background; name one of {_names(campaign)}")
    return Log(campaign.log, (campaign.lock,))


def _names(campaign: CampaignFiles) -> str:
    names = sorted(path.name for path in campaign.runs.iterdir()) if campaign.runs.is_dir() else []
    more = f" and {len(names) - SHOWN_RUNS} more" if len(names) > SHOWN_RUNS else ""
    return plain(", ".join(names[:SHOWN_RUNS]) + more, 1000)
