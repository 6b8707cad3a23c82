"""One run's own configuration: the file, a condition's overrides and a seed, merged without loss."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_type_hints

from retrain.config.schema import Condition, Config

T = TypeVar("T")

# A condition that names another plugin starts with that plugin's defaults, not with the file's
# parameters for a different one.
PARAMS_OF = {
    "advantage_mode": "advantage_params",
    "transform_mode": "transform_params",
    "loss_mode": "loss_params",
    "task": "options",
    "reward": "params",
    "backend": "options",
}
SHORTHANDS = ("advantage_mode", "transform_mode")
OVERRIDABLE = {f.name for f in dataclasses.fields(Condition)} - {"name", *SHORTHANDS}


def overrides_of(condition: Mapping[str, Any]) -> dict[str, Any]:
    """Return a raw condition's overrides as sections, its shorthands spelled out."""
    sections = {k: v for k, v in condition.items() if k in OVERRIDABLE and v != {}}
    modes = {k: condition[k] for k in SHORTHANDS if condition.get(k) is not None}
    algorithm = sections.get("algorithm", {})
    if modes and isinstance(algorithm, dict):
        sections["algorithm"] = {**modes, **algorithm}
    return sections


def merge(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Lay tables over tables, key by key; parameters of a plugin that is replaced are dropped."""
    merged = dict(base)
    for key, value in overrides.items():
        below = merged.get(key)
        if key in PARAMS_OF and isinstance(value, str) and isinstance(below, str) and below != value:
            merged[PARAMS_OF[key]] = {}
    for key, value in overrides.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def resolve(config: Config, condition: Condition | None, seed: int) -> Config:
    """Return the configuration of one run: no campaign, its own seed, every value spelled out."""
    tables = dataclasses.asdict(config)
    campaign = tables.pop("campaign") or {}
    if campaign.get("max_steps") is not None:
        tables["training"]["max_steps"] = campaign["max_steps"]
    if condition is not None:
        tables = merge(tables, overrides_of(dataclasses.asdict(condition)))
    tables["training"] = {**tables["training"], "seed": seed}
    return build(Config, tables)


def build(kind: type[T], table: Mapping[str, Any]) -> T:
    """Build a section from tables that were checked before (unknown keys are TypeErrors)."""
    sections = sections_of(cast(Hashable, kind))
    values = {
        key: build(sections[key], value) if key in sections and isinstance(value, dict) else value
        for key, value in table.items()
    }
    return kind(**values)


@cache  # reading type hints takes longer than all the rest, and a campaign builds a config per run
def sections_of(kind: Any) -> dict[str, Any]:
    """Map the keys of a table that are tables themselves to their classes."""
    found = {}
    for key, hint in get_type_hints(kind).items():
        section = next((c for c in (hint, *get_args(hint)) if dataclasses.is_dataclass(c)), None)
        if isinstance(section, type):
            found[key] = section
    return found


def as_tables(config: Config) -> dict[str, Any]:
    """Return a run's configuration as TOML tables: everything but what is absent."""
    return {name: _present(table) for name, table in dataclasses.asdict(config).items() if table is not None}


def _present(table: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in table.items() if v is not None}
