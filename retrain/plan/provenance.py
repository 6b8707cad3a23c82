"""What a campaign was made from: `origin.json`, written at the start, with a copy in every run.toml.

If it is lost, the copies say the same. Version 0.1.0 made none: what campaign.toml and the directory say
must do then, and a `--set` that changed results shows in the comparison with the runs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from retrain.config.versions import CURRENT, run_version
from retrain.errors import ConfigError, RecordsError
from retrain.records.atomic import read_json, write_json
from retrain.records.layout import CampaignFiles
from retrain.records.run_toml import files_of_runs, recorded_tables

STAMP = re.compile(r"-\d{8}T\d{6}Z-[0-9a-f]{4}$")  # of a campaign's directory
ENGINES = ("slurm", "ray")  # launchers that keep what they submitted in a folder of their name


@dataclass(frozen=True)
class Provenance:
    """What the file alone does not say."""

    name: str  # of the campaign
    overrides: tuple[str, ...]  # --set
    where: str  # the directory that relative paths of the file start from; "" if not known
    seed: int | None  # drawn for a file that gives none
    launcher: str
    digest: str  # of campaign.toml as given
    options: Mapping[str, Any] = field(default_factory=dict)  # of the launcher
    version: int = CURRENT  # what the file's keys mean
    way_back: str = "../.."  # from the campaign's directory to `where`: both may have moved
    beside: str = "."  # from `where` to the file's directory, in which dotted paths are looked for first


def digest(content: bytes) -> str:
    """Identify a file's content."""
    return hashlib.sha256(content).hexdigest()


def write_provenance(files: CampaignFiles, origin: Provenance) -> None:
    """Write it; before campaign.toml, without which a directory is no campaign."""
    write_json(files.origin, asdict(origin))


def read_provenance(files: CampaignFiles) -> Provenance:
    """Read it.

    Raises:
        RecordsError: it is missing or damaged.
    """
    found = read_json(files.origin)
    if found is None:
        raise RecordsError(f"{files.origin}: is missing")
    try:
        return _parse(found)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RecordsError(f"{files.origin}: is damaged ({error!r})") from error


def known_origin(files: CampaignFiles) -> tuple[Provenance, str]:
    """Read it, or make it again from the runs.

    Returns:
        It, and what was wrong with the file; "" if nothing.
    """
    try:
        return read_provenance(files), ""
    except RecordsError as error:
        table = _campaign_table(files)
        found = _from_runs(files) or _from_directory(files, table)
        options = table.get(found.launcher)
        return replace(found, options=options if isinstance(options, dict) else {}), str(error)


def working_directories(files: CampaignFiles, origin: Provenance) -> list[Path]:
    """List where a campaign's relative paths may start from, the likeliest first.

    That is where it was started; if that is gone, the project has moved, with the campaign or without.
    """
    if origin.where and Path(origin.where).is_dir():
        return [Path(origin.where)]
    near = (files.directory.absolute() / origin.way_back).resolve()
    return [path for path in (near, Path.cwd()) if path.is_dir()]


def as_table(origin: Provenance) -> dict[str, Any]:
    """Return what a run.toml, which is copied and shared, holds of it: not the launcher's options."""
    return {key: value for key, value in asdict(origin).items() if value is not None and key != "options"}


def _from_runs(files: CampaignFiles) -> Provenance | None:
    for run in files_of_runs(files).values():
        table = recorded_tables(run).get("run")
        copy = table.get("origin") if isinstance(table, dict) else None
        try:
            return _parse({"seed": None, **(copy or {})})
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
    return None


def _from_directory(files: CampaignFiles, table: Mapping[str, Any]) -> Provenance:
    runs = [found for run in files_of_runs(files).values() if (found := recorded_tables(run))]
    trained = [training for found in runs if isinstance(training := found.get("training"), dict)]
    seeds = {seed for training in trained if isinstance(seed := training.get("seed"), int)}
    launcher = next((name for name in ENGINES if (files.directory / name).is_dir()), "")
    return Provenance(
        name=str(table.get("name") or STAMP.sub("", files.directory.name)),
        overrides=(),
        where="",
        seed=seeds.pop() if len(seeds) == 1 else None,
        launcher=launcher or str(table.get("launcher", "local")),
        digest="",
        version=min((run_version(found, CURRENT) for found in runs), default=CURRENT),
    )


def _campaign_table(files: CampaignFiles) -> Mapping[str, Any]:
    from retrain.config.load import load_tables  # imports pydantic, and an origin is seldom lost

    try:
        found = load_tables(files.campaign_toml).get("campaign")
    except ConfigError:  # whoever needs it will read it again, and say so
        return {}
    return found if isinstance(found, dict) else {}


def _parse(found: Mapping[str, Any]) -> Provenance:
    seed = found["seed"]
    return Provenance(
        name=str(found["name"]),
        overrides=tuple(map(str, found["overrides"])),
        where=str(found["where"]),
        seed=None if seed is None else int(seed),
        launcher=str(found["launcher"]),
        digest=str(found["digest"]),
        options=dict(found.get("options", {})),
        version=int(found.get("version", 1)),
        way_back=str(found.get("way_back", "../..")),
        beside=str(found.get("beside", ".")),
    )
