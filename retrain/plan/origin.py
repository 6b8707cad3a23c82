"""What a campaign was made from, and how its file differs now: `origin.json`, written once at the start.

A campaign goes on as it began. Whatever would change results must be accepted by the user; how runs
are launched (workers, retries, timeouts) may change freely.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from retrain.config.resolve import NOT_IN_DIGEST, SCHEDULING, as_tables
from retrain.config.versions import CURRENT, as_meant, run_version
from retrain.errors import RecordsError
from retrain.plan.matrix import Plan
from retrain.records.atomic import read_json, write_json
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.text import plain

CONFIG_HASH = re.compile(
    rb'^config_hash = "([0-9a-f]+)"$', re.MULTILINE
)  # parsing TOML takes 30 times longer
SHOWN_RUNS = 3  # named in a line of a diff


@dataclass(frozen=True)
class Origin:
    """What the file alone does not say."""

    name: str  # of the campaign
    overrides: tuple[str, ...]  # --set
    where: str  # the directory that relative paths of the file start from
    seed: int | None  # drawn for a file that gives none
    launcher: str
    digest: str  # of campaign.toml as given
    options: Mapping[str, Any] = field(default_factory=dict)  # of the launcher
    version: int = CURRENT  # what the file's keys mean


def digest(content: bytes) -> str:
    """Identify a file's content."""
    return hashlib.sha256(content).hexdigest()


def write_origin(files: CampaignFiles, origin: Origin) -> None:
    """Write it; before campaign.toml, without which a directory is no campaign."""
    write_json(files.origin, asdict(origin))


def read_origin(files: CampaignFiles) -> Origin:
    """Read it.

    Raises:
        RecordsError: it is missing or damaged.
    """
    found = read_json(files.origin)
    if found is None:
        raise RecordsError(f"{files.origin}: is missing, so nothing says how this campaign began; restore it")
    try:
        seed = found["seed"]
        return Origin(
            name=str(found["name"]),
            overrides=tuple(map(str, found["overrides"])),
            where=str(found["where"]),
            seed=None if seed is None else int(seed),
            launcher=str(found["launcher"]),
            digest=str(found["digest"]),
            options=dict(found.get("options", {})),
            version=int(found.get("version", 1)),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RecordsError(f"{files.origin}: is damaged ({error!r}); restore it") from error


def recorded_hash(files: RunFiles) -> str:
    """Give the hash of the configuration in a run's run.toml; "" if it cannot be read."""
    try:
        found = CONFIG_HASH.findall(files.run_toml.read_bytes())
    except OSError:
        return ""
    return found[-1].decode() if found else ""  # [run] is the last table


def hashes_of_runs(files: CampaignFiles, planned: Iterable[str], alone: bool) -> dict[str, str]:
    """Give every run's hash as its own run.toml has it, for a campaign without a manifest.

    Args:
        files: the campaign's.
        planned: ids of the runs that its file asks for.
        alone: the campaign is a single run, whose files lie in its directory.
    """
    if alone:
        found = dict.fromkeys(planned, recorded_hash(RunFiles(files.directory)))
    else:
        names = [path.name for path in files.runs.iterdir()] if files.runs.is_dir() else []
        found = {name: recorded_hash(files.run(name)) for name in names}
    return {run_id: config_hash for run_id, config_hash in found.items() if config_hash}


def changed_keys(plan: Plan, recorded: Mapping[str, str], files_of: Callable[[str], RunFiles]) -> list[str]:
    """Say what differs from how the campaign began, one line each; empty if results stay comparable.

    Args:
        plan: what the campaign's file asks for now.
        recorded: the hash that each run began with.
        files_of: where a run's files lie.
    """
    planned = {run.run_id: run for run in plan.runs}
    lines = [f"run {name}: is new" for name in planned if name not in recorded]
    lines += [f"run {name}: is gone" for name in recorded if name not in planned]
    changes: dict[str, list[str]] = {}
    for run_id, run in planned.items():
        if recorded.get(run_id, run.config_hash) != run.config_hash:
            for change in _differences(recorded_tables(files_of(run_id)), as_tables(run.config)):
                changes.setdefault(change, []).append(run_id)
    return lines + [f"{change} ({_names(runs)})" for change, runs in changes.items()]


def recorded_tables(files: RunFiles) -> dict[str, Any]:
    """Give a run's run.toml; empty if it cannot be read."""
    try:
        tables = tomllib.loads(files.run_toml.read_text(encoding="utf-8"))
        return as_meant(tables, run_version(tables, CURRENT))
    except (OSError, ValueError):
        return {}


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    old, new = dict(_flat(before)), dict(_flat(now))
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key):
            yield f"{key}: {_shown(old, key)} -> {_shown(new, key)}"


def _flat(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tables.items():
        if not prefix and key in NOT_IN_DIGEST:
            continue
        if key in SCHEDULING.get(prefix.rstrip("."), ()):
            continue
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _shown(tables: Mapping[str, Any], key: str) -> str:
    return plain(repr(tables[key]), 80) if key in tables else "(absent)"


def _names(runs: list[str]) -> str:
    more = f" and {len(runs) - SHOWN_RUNS} more" if len(runs) > SHOWN_RUNS else ""
    return ", ".join(runs[:SHOWN_RUNS]) + more
