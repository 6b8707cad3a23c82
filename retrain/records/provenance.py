"""Provenance of a campaign: `origin.json`, written at the start, with a copy in every run.toml.

A lost origin.json is rebuilt from the copies. Without any, campaign.toml and the directory are used, and a
`--set` that changed results shows in the comparison with the runs.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from retrain.base.errors import ConfigError, DamagedRecordError, RecordsError
from retrain.config.keys import CURRENT, Tables, run_version, table_at
from retrain.records.files import read_json, record_of, write_json
from retrain.records.layout import (
    CampaignFiles,
    RunFiles,
    files_of_runs,
    name_of,
    recorded_table,
    recorded_tables,
)

if TYPE_CHECKING:
    from retrain.records.run_row import RunEntry

CLUSTERS = ("slurm", "ray")  # launchers that keep their submissions in a directory of their name


@dataclass(frozen=True)
class Provenance:
    """What the file alone does not hold."""

    name: str  # of the campaign
    overrides: tuple[str, ...]  # --set
    where: str  # the directory that the file's relative paths are relative to; "" if not known
    seed: int | None  # drawn for a file without a seed
    launcher: str
    digest: str  # of campaign.toml as given
    options: Tables = field(default_factory=dict)  # of the launcher
    version: int = CURRENT  # of the meaning of the file's keys
    way_back: str = "../.."  # from the campaign's directory to `where`: both may have moved
    added_seeds: int = 0  # by `retrain resume --seeds`
    beside: str = "."  # from `where` to the file's directory, where dotted paths are searched first


def digest(content: bytes) -> str:
    """Identify a file's content."""
    return hashlib.sha256(content).hexdigest()


def write_provenance(files: CampaignFiles, origin: Provenance) -> None:
    """Write origin.json, before campaign.toml, which makes a directory a campaign."""
    write_json(files.origin, asdict(origin))


def known_origin(files: CampaignFiles, *, is_replaced: bool = False) -> tuple[Provenance, str]:
    """Read origin.json, or rebuild it from the runs; return it and the problem with the file, "" for none.

    Where the result replaces the file, one that is whole but cannot be read for now is a RecordsError.
    """
    lost = "is damaged"
    try:
        if (written := read_json(files.origin)) is not None:
            return record_of(Provenance, written), ""
        lost = "is missing"
    except (RecordsError, ValueError) as error:
        if is_replaced and not isinstance(error, (DamagedRecordError, ValueError)):
            raise
    from retrain.config.load import load_tables  # imports pydantic, and is seldom needed

    try:
        table = table_at(load_tables(files.campaign_toml), "campaign")
    except ConfigError:  # code that needs it reads it again and reports the error
        table = {}
    origin = _rebuilt(files, table)
    options = table_at(table, origin.launcher) or table_at(table, "launcher_options")
    return replace(origin, options=options), f"{files.origin}: {lost}"


def working_directories(files: CampaignFiles, origin: Provenance) -> list[Path]:
    """List directories that a campaign's relative paths may be relative to, the likeliest first.

    This is the directory where it was started, unless the project was copied with the campaign: then the
    copy's. If the first is gone, the project has moved, with or without the campaign, to where more of the
    files and plugins are that a run uses.
    """
    near = (files.directory.absolute() / origin.way_back).resolve()
    if origin.where and Path(origin.where).is_dir():
        where = Path(origin.where)
        if not near.is_dir() or near.samefile(where):
            return [where]
        there = [path for path in _used(files, origin) if (where / path).exists()]
        return [near, where] if there and all((near / path).exists() for path in there) else [where]
    places = [path for path in dict.fromkeys((near, Path.cwd())) if path.is_dir()]
    if len(places) > 1:
        used = _used(files, origin)
        places.sort(key=lambda place: sum((place / path).exists() for path in used), reverse=True)
    return places


def _used(files: CampaignFiles, origin: Provenance) -> set[Path]:
    """Return the files that a run uses, or in which its plugins may be, relative to its project."""
    from retrain.config.files import mapped  # imports the schema, and is seldom needed

    run = next(iter(files_of_runs(files).values()), None)
    if run is None:
        return set()
    where, tables = Path(origin.where), dict(recorded_tables(run))
    keys = table_at(tables, "run", "files")
    tables.pop("run", None)
    texts: dict[str, str] = {}  # by dotted key
    mapped(tables, "", "", lambda value, key, _: texts.update({key[1:]: str(value)}))
    named = [Path(texts[key]) for key in keys if key in texts]
    beside = Path(os.path.normpath(where / origin.beside))
    data = {
        Path(os.path.relpath(path, where))
        for path in named
        if path.is_relative_to(where) or path.is_relative_to(beside)
    }
    return data | {Path(origin.beside, name) for text in texts.values() for name in _modules(text)}


def _modules(text: str) -> tuple[str, ...]:
    """Return the names of the file and the folder in which a dotted path may be; none for other texts."""
    top, dot, _ = text.partition(".")
    return (f"{top}.py", top) if dot and top.isidentifier() else ()


def _rebuilt(files: CampaignFiles, table: Tables) -> Provenance:
    """Return the origin by a run's copy of it, or by the directory and the table `[campaign]` of its file."""
    runs = files_of_runs(files).values()
    for run in runs:
        origin = recorded_table(run, "run").get("origin")
        with suppress(ValueError):
            return record_of(Provenance, {"seed": None, **(origin if isinstance(origin, dict) else {})})
    drawn = [recorded_table(run, "training").get("seed") for run in runs]
    seeds = {seed for seed in drawn if isinstance(seed, int)}
    launcher = next((name for name in CLUSTERS if (files.directory / name).is_dir()), "")
    return Provenance(
        name=str(table.get("name") or name_of(files.directory.name)),
        overrides=(),
        where="",
        seed=seeds.pop() if len(seeds) == 1 else None,
        launcher=launcher or str(table.get("launcher", "local")),
        digest="",
        version=min((run_version(t, CURRENT) for t in map(recorded_tables, runs) if t), default=CURRENT),
    )


def recorded_entry(files: RunFiles) -> RunEntry:
    """Describe a run by its run.toml, or by the name of its directory if that cannot be read."""
    from retrain.records.manifest import entry_from_name
    from retrain.records.run_row import RunEntry

    name = files.directory.resolve().name
    run, training = recorded_table(files, "run"), recorded_table(files, "training")
    if not run or not training:
        return entry_from_name(name)
    seed, steps = training.get("seed"), training.get("max_steps")
    if run.get("ends_at") and run.get("ends_per") == "steps":
        steps = int(run["ends_at"])
    return RunEntry(
        run_id=str(run.get("run_id", name)),
        condition=str(run.get("condition", "")),
        seed=seed if isinstance(seed, int) else -1,
        max_steps=steps if isinstance(steps, int) else 0,
    )
