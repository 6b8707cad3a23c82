"""What a campaign was made from, and how its file differs now: `origin.json`, written once at the start.

A campaign goes on as it began. Whatever would change results must be accepted by the user; how runs
are launched (workers, retries, timeouts) may change freely.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from retrain.config.resolve import NOT_IN_DIGEST, SCHEDULING, as_tables
from retrain.errors import RecordsError
from retrain.plan.matrix import Plan
from retrain.records.atomic import read_json, write_json
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.manifest import Manifest
from retrain.records.text import plain

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
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RecordsError(f"{files.origin}: is damaged ({error!r}); restore it") from error


def changed_keys(plan: Plan, manifest: Manifest, files_of: Callable[[str], RunFiles]) -> list[str]:
    """Say what differs from how the campaign began, one line each; empty if results stay comparable."""
    recorded = {run.run_id: run.config_hash for run in manifest.runs}
    planned = {run.run_id: run for run in plan.runs}
    lines = [f"run {name}: is new" for name in planned if name not in recorded]
    lines += [f"run {name}: is gone" for name in recorded if name not in planned]
    changes: dict[str, list[str]] = {}
    for run_id, run in planned.items():
        if recorded.get(run_id, run.config_hash) != run.config_hash:
            for change in _differences(_recorded(files_of(run_id)), as_tables(run.config)):
                changes.setdefault(change, []).append(run_id)
    return lines + [f"{change} ({_names(runs)})" for change, runs in changes.items()]


def _recorded(files: RunFiles) -> dict[str, Any]:
    try:
        return tomllib.loads(files.run_toml.read_text(encoding="utf-8"))
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
