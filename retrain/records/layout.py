"""The paths of all files of a campaign and of a run, and how their directories are created.

<log_dir>/<name>-<UTC>-<hex>/      a campaign: CampaignFiles
  runs/<run-id>/                   its runs: RunFiles
<log_dir>/<name>-<UTC>-<hex>/      a single run: both kinds of files in one directory
"""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
import time
import unicodedata
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from retrain.base.errors import ConfigError, RecordsError, is_passing, records_error
from retrain.config.keys import Table, Tables
from retrain.records.files import make_directory, make_new_directory, read_small, readable
from retrain.records.lines import mark_of
from retrain.records.text import plain

CALIBRATIONS = (
    "calibrations"  # in the log directory: benchmarks of `retrain calibrate`, kept apart from results
)
SHOWN_CAMPAIGNS = 3  # the newest
_MAX_NAME = 64
_ID = re.compile(r"-\d{8}T\d{6}Z-[0-9a-f]{4}$")  # suffix of a campaign's directory name
# parsing TOML takes 30 times longer
_CONFIG_HASH = re.compile(rb'^config_hash = "(v\d+:[0-9a-f]+)"$', re.MULTILINE)
_MAX_TRIES = 1000  # with 65,536 ids per second and name, so many collisions in a row are no accident


class _File:
    """The path of a file in the directory of its owner, made once: a Path is slow to make."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __set_name__(self, kind: object, attribute: str) -> None:
        self._attribute = attribute

    def __get__(self, owner: RunFiles | CampaignFiles, kind: object) -> Path:
        path = owner.directory / self._name
        vars(owner)[self._attribute] = path  # found there from now on
        return path


@dataclass(frozen=True)
class RunFiles:
    """The files of one run."""

    directory: Path
    run_toml = _File("run.toml")
    lock = _File("run.lock")
    attempts = _File("attempts.jsonl")
    status = _File("status.json")
    metrics = _File("metrics.jsonl")
    warmup = _File("warmup.jsonl")
    samples = _File("samples.jsonl")
    held_out = _File("heldout.jsonl")
    start = _File("start.json")
    evals = _File("evals")
    spend = _File("spend.json")
    states = _File("states.jsonl")
    output_log = _File("output.log")
    checkpoints = _File("checkpoints")
    done = _File("done.json")
    rung = _File("rung.json")

    @property
    def cluster_logs(self) -> tuple[Path, ...]:
        """The cluster's output for this run's tasks; empty files are left out."""
        return tuple(path for path in sorted(self.directory.glob("engine-*.out")) if path.stat().st_size)


@dataclass(frozen=True)
class CampaignFiles:
    """The files of one campaign."""

    directory: Path
    is_single: bool = False  # the files of its only run are in its own directory
    campaign_toml = _File("campaign.toml")
    origin = _File("origin.json")
    manifest = _File("manifest.json")
    mirror = _File("mirror.json")
    lock = _File("campaign.lock")
    log = _File("campaign.log")
    notices = _File("notices.jsonl")
    alerts = _File("alerts.jsonl")
    looks = _File("decision.jsonl")
    rungs = _File("search.jsonl")
    proposals = _File("proposals.jsonl")
    stop_request = _File("stop.json")
    permits = _File("permits")
    starts = _File("starts")
    runs = _File("runs")
    warm_ups = _File("warmups")

    def run(self, run_id: str) -> RunFiles:
        """Return a run's files; an id that would point outside the campaign's directory is refused."""
        if run_id in {"", ".", ".."} or "/" in run_id or "\0" in run_id:
            raise RecordsError(f"{run_id!r} is not a run id; use letters, digits and . _ + -")
        return RunFiles(self.directory if self.is_single else self.runs / run_id)

    def existing_run(self, run_id: str) -> RunFiles:
        """Return the files of a run that was created; a single run's are the campaign's own directory."""
        return RunFiles(self.directory) if is_single_run(self.directory) else self.run(run_id)


def open_campaign(directory: Path) -> CampaignFiles:
    """Return the files of an existing campaign.

    Raises:
        ConfigError: the directory holds none.
        RecordsError: its campaign.toml is lost, or it cannot be read.
    """
    files = CampaignFiles(directory)
    try:
        holds_one = files.campaign_toml.is_file()
    except OSError as error:
        raise records_error(directory, "look inside", error) from error
    if not holds_one and is_campaign(directory):
        raise RecordsError(f"{files.campaign_toml}: is missing; put the campaign's file back there")
    if not holds_one:
        raise ConfigError(f"{directory}: {instead_of(directory)}")
    require_own(files)
    return files


def require_own(files: CampaignFiles) -> None:
    """Raise RecordsError if a directory of a campaign is a link: what it leads to is not ours to change."""
    alone = RunFiles(files.directory)  # a single run's
    refuse_links(*(files.permits, files.starts, files.runs, files.warm_ups), alone.checkpoints, alone.evals)
    runs = [] if is_single_run(files.directory) else _run_directories(files)
    refuse_links(*(run.path for run in runs if run.is_symlink()))
    refuse_links(*(f"{run.path}/{name}" for run in runs for name in ("checkpoints", "evals")))


def refuse_links(*directories: Path | str) -> None:
    """Raise RecordsError if a directory of records is a symbolic link; others and missing ones may be."""
    for directory in directories:
        if os.path.islink(directory):  # noqa: PTH114 (`Path.is_symlink` raises where it may not look)
            raise RecordsError(
                f"{directory}: is a symbolic link, which records never follow; replace it by the directory "
                "that it leads to (to keep records on another disk, set logging.log_dir)"
            )


def instead_of(directory: Path) -> str:
    """Return why a directory is not a campaign's, and what to name instead.

    Raises ConfigError if it is a file, or holds only other files.
    """
    if not directory.exists():
        return "does not exist; `retrain status` lists the campaigns in logs/"
    campaigns = find_campaigns(directory)
    if not campaigns:
        return "no campaigns yet; start one with `retrain FILE.toml`"
    above = campaign_of(campaigns[0]).directory
    if above != campaigns[0]:
        return f"is a part of a campaign; name that: {above}"
    if is_single_run(directory):
        return "is a run by itself; name no other run after it"
    newest = ", ".join(str(path) for path in reversed(campaigns[-SHOWN_CAMPAIGNS:]))
    return f"is a log directory; name a campaign, such as the latest: {plain(newest, 1000)}"


def create_directory(log_dir: Path, name: str) -> Path:
    """Make a new directory for a campaign or single run: `<name>-<UTC time>-<4 hex digits>`.

    Raises:
        ConfigError: the path cannot be such a directory, as a file, in /proc or where nobody may write.
        RecordsError: it cannot be made for now, as on a full disk.
    """
    try:
        try:
            is_there = log_dir.is_dir()  # may be a link to another disk, unlike the directories made in it
        except OSError as error:
            raise records_error(log_dir, "look inside", error) from error
        if not is_there:
            make_directory(log_dir)
        for _ in range(_MAX_TRIES):
            stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
            directory = log_dir / f"{stem_of(name)}-{stamp}-{os.urandom(2).hex()}"
            with suppress(FileExistsError):
                make_new_directory(directory, exclusive=True)
                return directory
        raise RecordsError(f"{log_dir}: no free directory name for {name!r}; choose another log_dir")
    except RecordsError as error:
        is_read_only = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EROFS
        if is_passing(error) and not is_read_only:
            raise
        raise ConfigError(f"{error}, or choose another [logging].log_dir") from error


def stem_of(name: str) -> str:
    """Return what the directories of campaigns of a name begin with, for any name."""
    ascii_name = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9+._-]+", "-", ascii_name).strip(".-")[:_MAX_NAME] or "campaign"


def own_temporary_folder(name: str) -> Path:
    """Return a folder that this user's processes on this machine share, among temporary files.

    Raises:
        ConfigError: it belongs to somebody else, or others can read it.
        RecordsError: it cannot be made.
    """
    folder = Path(tempfile.gettempdir()) / f"retrain-{name}-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError as error:
        raise records_error(folder, "make", error) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(f"{folder}: is not a folder of this user alone; remove it, or set TMPDIR")
    return folder


def is_campaign(directory: Path) -> bool:
    """Whether a directory holds a campaign's files (a single run's directory does not count)."""
    return _is_ours(directory) and not is_single_run(directory)


def _is_ours(directory: Path) -> bool:
    files = CampaignFiles(directory)
    if is_single_run(directory) or _exists(files.campaign_toml):
        return True
    return _exists(files.manifest) and _exists(files.runs)  # other tools write a manifest.json without runs/


def is_single_run(directory: Path) -> bool:
    """Whether a directory is itself the directory of a run."""
    return _exists(RunFiles(directory).run_toml)


def find_campaigns(log_dir: Path) -> tuple[Path, ...]:
    """List the campaigns and single runs in a directory, oldest first; or the directory itself if it is one.

    Raises:
        ConfigError: it does not exist, or holds only other files, so it is probably not a log directory.
        RecordsError: it cannot be listed, or no campaign in it can be read.
    """
    if _is_ours(log_dir):
        return (log_dir,)
    try:
        paths = sorted(log_dir.iterdir(), key=by_start)
    except FileNotFoundError:
        fix = "start a campaign with `retrain FILE.toml`, or name the directory that logging.log_dir sets"
        raise ConfigError(f"{log_dir}: does not exist; {fix}") from None
    except NotADirectoryError:
        raise ConfigError(f"{log_dir}: is a file; name a log directory or a campaign's") from None
    except OSError as error:
        raise RecordsError(f"{log_dir}: cannot be listed ({error.strerror})") from error
    campaigns = tuple(filter(_is_ours, paths))
    others = [p.name for p in paths if p.name not in (CALIBRATIONS, "permits") and p.name[0] != "."]
    if not campaigns and not all(map(_ID.search, others)):
        raise ConfigError(f"{log_dir}: holds no campaign; name a log directory or a campaign's")
    closed = [path for path in paths if _ID.search(path.name) and not os.access(path, os.R_OK | os.X_OK)]
    if closed and not campaigns:
        raise records_error(
            closed[0], "look inside", PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        )
    return campaigns


def unread_campaigns(log_dir: Path) -> list[str]:
    """List what a log directory holds of campaigns that `find_campaigns` leaves out, each with the reason."""
    if _is_ours(log_dir):
        return []
    lines = []
    for path in sorted(log_dir.iterdir(), key=by_start):
        if not _ID.search(path.name) or not path.is_dir() or _is_ours(path):
            continue
        if not os.access(path, os.R_OK | os.X_OK):
            lines.append(f"{path} is left out: this user may not look inside")
        elif _exists(CampaignFiles(path).runs):  # else it has only just been made
            lines.append(
                f"{path} is left out: it has runs, but no campaign.toml; restore it or move them away"
            )
    return [plain(line, 500) for line in lines]


def name_of(directory: str) -> str:
    """Return the name in that of a campaign's directory, which ends in a time and four digits."""
    return _ID.sub("", directory)


def by_start(path: Path) -> tuple[str, str]:
    """Return a sort key by the time in a directory's name, then by name; names without one come first."""
    start = _ID.search(path.name)
    return (start[0] if start else "", path.name)


def campaign_of(run_dir: Path) -> CampaignFiles:
    """Return the files of the campaign that a run belongs to; a single run is its own campaign.

    Raises RecordsError if that cannot be known for now: a run would miss a request to stop.
    """
    above, alone = CampaignFiles(run_dir.parent.parent), CampaignFiles(run_dir)
    if run_dir.parent.name != "runs" or _exists(alone.campaign_toml):
        return alone  # a log directory may be named `runs`, and lie beside a user's campaign.toml
    mark_of(str(above.campaign_toml))  # unlike `is_campaign`, it raises
    return above if is_campaign(above.directory) else alone


def recorded_hash(files: RunFiles) -> str:
    """Return the hash of the configuration in a run's run.toml; "" if it cannot be read."""
    text = readable(read_small, files.run_toml)
    hashes = _CONFIG_HASH.findall(text or b"")
    return hashes[-1].decode() if hashes else ""  # [run] is the last table


def recorded_tables(files: RunFiles) -> Table:
    """Return a run's run.toml; empty if it cannot be read."""
    import tomllib  # here: most readers never parse one

    try:
        return tomllib.loads((read_small(files.run_toml) or b"").decode("utf-8-sig"))
    except (RecordsError, ValueError, RecursionError):
        return {}


def recorded_table(files: RunFiles, name: str) -> Tables:
    """Return one table of a run's run.toml; empty if it cannot be read."""
    table = recorded_tables(files).get(name)
    return table if isinstance(table, dict) else {}


def files_of_runs(files: CampaignFiles) -> dict[str, RunFiles]:
    """Return the files of every run that has a directory, by run id."""
    if is_single_run(files.directory):
        alone = RunFiles(files.directory)
        return {str(recorded_table(alone, "run").get("run_id", files.directory.name)): alone}
    return {entry.name: RunFiles(files.runs / entry.name) for entry in _run_directories(files)}


def _run_directories(files: CampaignFiles) -> list[os.DirEntry[str]]:
    """List a campaign's directories of runs, and links to such, by name; the listing tells which is which."""
    try:
        with os.scandir(files.runs) as entries:
            if not os.access(files.runs, os.X_OK):  # what may be named only, and not looked at
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return sorted(filter(_is_directory, entries), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise records_error(files.runs, "list", error) from error


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link to itself
            return False
        raise


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # no permission to read it: not ours to show
        return False
