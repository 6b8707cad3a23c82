"""The paths of all files of a campaign and of a run, and how their directories are created.

<log_dir>/<name>-<UTC>-<hex>/      a campaign: CampaignFiles
  runs/<run-id>/                   its runs: RunFiles
<log_dir>/<name>-<UTC>-<hex>/      a single run: both kinds of files in one directory
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from retrain.errors import ConfigError, RecordsError, records_error
from retrain.records.files import make_directory, make_new_directory

TRIALS = "calibrations"  # in the log directory: trials of `retrain calibrate`, kept apart from results
_MAX_NAME = 64
_ID = re.compile(r"-\d{8}T\d{6}Z-[0-9a-f]{4}$")  # suffix of a campaign's directory name
_MAX_TRIES = 1000  # with 65,536 ids per second and name, so many collisions in a row are no accident


@dataclass(frozen=True)
class RunFiles:
    """The files of one run."""

    directory: Path

    @property
    def run_toml(self) -> Path:
        return self.directory / "run.toml"

    @property
    def lock(self) -> Path:
        return self.directory / "run.lock"

    @property
    def attempts(self) -> Path:
        return self.directory / "attempts.jsonl"

    @property
    def status(self) -> Path:
        return self.directory / "status.json"

    @property
    def metrics(self) -> Path:
        return self.directory / "metrics.jsonl"

    @property
    def warmup(self) -> Path:
        return self.directory / "warmup.jsonl"

    @property
    def samples(self) -> Path:
        return self.directory / "samples.jsonl"

    @property
    def output_log(self) -> Path:
        return self.directory / "output.log"

    @property
    def engine_logs(self) -> tuple[Path, ...]:
        """The engine's output for this run's tasks, `engine-<task>.out`; empty files are left out."""
        return tuple(path for path in sorted(self.directory.glob("engine-*.out")) if path.stat().st_size)

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints"

    @property
    def done(self) -> Path:
        return self.directory / "done.json"


@dataclass(frozen=True)
class CampaignFiles:
    """The files of one campaign."""

    directory: Path

    @property
    def campaign_toml(self) -> Path:
        return self.directory / "campaign.toml"

    @property
    def origin(self) -> Path:
        return self.directory / "origin.json"

    @property
    def manifest(self) -> Path:
        return self.directory / "manifest.json"

    @property
    def lock(self) -> Path:
        return self.directory / "campaign.lock"

    @property
    def log(self) -> Path:
        return self.directory / "campaign.log"

    @property
    def notices(self) -> Path:
        return self.directory / "notices.jsonl"

    @property
    def stop_request(self) -> Path:
        return self.directory / "stop.json"

    @property
    def permits(self) -> Path:
        return self.directory / "permits"

    @property
    def runs(self) -> Path:
        return self.directory / "runs"

    def run(self, run_id: str) -> RunFiles:
        """Return a run's files; the id must be a plain name.

        Raises:
            RecordsError: the id would point outside the campaign's directory.
        """
        if run_id in {"", ".", ".."} or "/" in run_id or "\0" in run_id:
            raise RecordsError(f"{run_id!r} is not a run id; use letters, digits and . _ + -")
        return RunFiles(self.runs / run_id)


def open_campaign(directory: Path) -> CampaignFiles:
    """Return the files of an existing campaign.

    Raises:
        ConfigError: the directory does not hold a campaign.
        RecordsError: the directory cannot be read.
    """
    files = CampaignFiles(directory)
    try:
        holds_one = files.campaign_toml.is_file()
    except OSError as error:
        raise records_error(directory, "look inside", error) from error
    if not holds_one:
        raise ConfigError(f"{directory}: holds no campaign; `retrain status` lists the campaigns in logs/")
    return files


def create_directory(log_dir: Path, name: str) -> Path:
    """Make a new directory for a campaign or single run: `<name>-<UTC time>-<4 hex digits>`.

    The name is unique, even if several processes create directories in the same millisecond.

    Raises:
        RecordsError: it cannot be made.
    """
    try:
        is_there = log_dir.is_dir()  # may be a link to another disk, unlike the directories made in it
    except OSError as error:
        raise records_error(log_dir, "look inside", error) from error
    if not is_there:
        make_directory(log_dir)
    for _ in range(_MAX_TRIES):
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        directory = log_dir / f"{_as_file_name(name)}-{stamp}-{os.urandom(2).hex()}"
        try:
            make_new_directory(directory, exclusive=True)
        except FileExistsError:
            continue
        return directory
    raise RecordsError(f"{log_dir}: no free directory name for {name!r}; choose another log_dir")


def is_campaign(directory: Path) -> bool:
    """Whether a directory holds a campaign's files (a single run's directory does not count)."""
    files = CampaignFiles(directory)
    # other tools also write a manifest.json, but not next to runs/
    is_ours = _exists(files.campaign_toml) or (_exists(files.manifest) and _exists(files.runs))
    return is_ours and not is_single_run(directory)


def is_single_run(directory: Path) -> bool:
    """Whether a directory is itself the directory of a run."""
    return _exists(RunFiles(directory).run_toml)


def find_campaigns(log_dir: Path) -> tuple[Path, ...]:
    """List the campaigns and single runs in a directory, by name; or the directory itself if it is one.

    Raises:
        ConfigError: `log_dir` holds only other files, so it is probably not a log directory.
        RecordsError: `log_dir` does not exist or cannot be listed.
    """
    if is_single_run(log_dir) or is_campaign(log_dir):
        return (log_dir,)
    try:
        found = sorted(log_dir.iterdir())
    except FileNotFoundError:
        raise RecordsError(f"{log_dir}: does not exist; give the directory set as log_dir") from None
    except OSError as error:
        raise RecordsError(f"{log_dir}: cannot be listed ({error.strerror})") from error
    campaigns = tuple(path for path in found if is_single_run(path) or is_campaign(path))
    if not campaigns and any(_is_strange(path) for path in found):
        raise ConfigError(f"{log_dir}: holds no campaign; give a log directory or a campaign's directory")
    return campaigns


def _is_strange(path: Path) -> bool:
    """Whether a path in a log directory is not one of ours."""
    is_ours = path.name in (TRIALS, "permits") or _ID.search(path.name) or path.name.startswith(".")
    return not is_ours


def campaign_of(run_dir: Path) -> CampaignFiles:
    """Return the files of the campaign that a run belongs to; a single run is its own campaign."""
    above = run_dir.parent.parent
    return CampaignFiles(above if run_dir.parent.name == "runs" and is_campaign(above) else run_dir)


def permits_directory(run_dir: Path) -> Path:
    """Return the directory of a run's permits: its campaign's, or its own if it is a single run."""
    return campaign_of(run_dir).permits


def _as_file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9+._-]+", "-", name).strip(".-")[:_MAX_NAME] or "campaign"


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # no permission to read it: not ours to show
        return False
