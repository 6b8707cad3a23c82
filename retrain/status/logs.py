"""Finding a run or its log, and whether the log is still written."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from retrain.config.resolve import label_of
from retrain.errors import RecordsError
from retrain.locks.held import is_held
from retrain.records.layout import CampaignFiles, RunFiles, find_campaigns, is_campaign, is_single_run
from retrain.records.text import first_of, plain

SHOWN_RUNS = 10
SHOWN_CAMPAIGNS = 3  # the newest


@dataclass(frozen=True)
class Log:
    """A file of output, and the locks of the processes that write it."""

    path: Path
    lock: Path  # of the process that writes it
    starter: Path | None = None  # lock of the orchestrator, which may start another such process
    end: Path | None = None  # a file that exists once no further process will be started
    beside: tuple[Path, ...] = ()  # the engine's output for the run's tasks

    def is_over(self) -> bool:
        """Whether no process that could write to it is alive."""
        if is_held(self.lock):
            return False
        is_finished = self.end is not None and self.end.exists()
        return is_finished or self.starter is None or not is_held(self.starter)


def find_log(directory: Path, run_id: str = "") -> Log:
    """Find the output of a run, given by its directory or by a campaign's and its id; else a campaign's own.

    Raises:
        RecordsError: there is no such run; lists the existing ones.
    """
    campaign = CampaignFiles(directory)
    if not run_id and is_campaign(directory):
        if not campaign.log.exists():
            raise RecordsError(
                f"{directory}: never ran in the background, so it has no log; name a run: {_names(campaign)}"
            )
        return Log(campaign.log, campaign.lock)
    files = find_run(directory, run_id)
    above = files.directory.parent.parent if files.directory.parent.name == "runs" else directory
    starter = CampaignFiles(above).lock
    return Log(files.output_log, files.lock, starter, files.done, files.engine_logs)


def find_run(directory: Path, run_id: str = "") -> RunFiles:
    """Find a run, given by its directory or by its campaign's and its id or CONDITION_sSEED.

    Raises:
        RecordsError: there is no such run; lists the existing ones.
    """
    campaign = CampaignFiles(directory)
    if not is_campaign(directory):
        if run_id or not is_single_run(directory):
            raise RecordsError(f"{directory}: {_what_it_is(directory)}")
        return RunFiles(directory)
    if not run_id:
        raise RecordsError(f"{directory}: is a campaign; name one of its runs: {_names(campaign)}")
    condition, _, seed = run_id.rpartition("_s")
    for name in (run_id, f"{label_of(condition)}_s{seed}"):
        with suppress(RecordsError):  # an invalid id may still be a valid name
            files = campaign.run(name)
            if files.run_toml.is_file():
                return files
    raise RecordsError(f"{directory}: has no run {run_id!r}; it has {_names(campaign)}")


def _what_it_is(directory: Path) -> str:
    """Return why a directory is neither a campaign nor a run, and what to specify instead."""
    if not directory.is_dir():
        return "does not exist; `retrain status` lists campaigns"
    found = find_campaigns(directory)
    if not found:
        return "no campaigns yet; start one with `retrain FILE.toml`"
    newest = ", ".join(str(path) for path in reversed(found[-SHOWN_CAMPAIGNS:]))
    return f"is a log directory; name a campaign, such as the latest: {plain(newest, 1000)}"


def _names(campaign: CampaignFiles) -> str:
    names = sorted(path.name for path in campaign.runs.iterdir()) if campaign.runs.is_dir() else []
    return plain(first_of(names, SHOWN_RUNS), 1000)
