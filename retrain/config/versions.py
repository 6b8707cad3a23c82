"""Reads records of earlier versions with the meanings that their keys had then.

If a key's meaning changes but not its name, the number increases. It is written into run.toml and
origin.json; a record without it is from 0.1.0, whose number is 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrain.config.keys import Table, Tables

CURRENT = 4
OVERLAPPING = 4  # since then a speed alone means max_staleness = 1; before, it had no effect
BESIDE_THE_FILE = (
    3  # since then inputs are relative to the file that names them; before, to the working directory
)
OVER_ALL_SCORED = 2
# Number 1 divided the loss by what informative groups hold; since 2 these words mean all scored rollouts.
OVER_INFORMATIVE = {name: f"informative_{name}" for name in ("token", "sequence", "constant")}


def as_meant(tables: Tables, otherwise: int = CURRENT) -> Table:
    """Return a file's tables with current names for values and defaults whose meaning has changed.

    `otherwise` is the version of a file that is no run.toml.
    """
    version = run_version(tables, otherwise)
    limiter = tables.get("rate_limiter", {})
    if version < OVERLAPPING and isinstance(limiter, Mapping):
        tables = {**tables, "rate_limiter": {"max_staleness": 0, **limiter}}
        campaign = tables.get("campaign")
        if isinstance(campaign, Mapping) and isinstance(campaign.get("conditions"), list):
            conditions = [_taking_turns(one) for one in campaign["conditions"]]
            tables = {**tables, "campaign": {**campaign, "conditions": conditions}}
    if version >= OVER_ALL_SCORED:
        return dict(tables)
    renamed = dict(_renamed(tables, default="token"))
    campaign = tables.get("campaign")
    if isinstance(campaign, Mapping) and isinstance(campaign.get("conditions"), list):
        renamed["campaign"] = {**campaign, "conditions": [_renamed(one) for one in campaign["conditions"]]}
    return renamed


def _taking_turns(condition: Any) -> Any:
    limiter = condition.get("rate_limiter") if isinstance(condition, Mapping) else None
    if not isinstance(limiter, Mapping) or "rate_limit_speed_batch_per_sim" not in limiter:
        return condition
    return {**condition, "rate_limiter": {"max_staleness": 0, **limiter}}


def run_version(tables: Tables, otherwise: int) -> int:
    """Return the number in a run.toml; `otherwise` for any other file."""
    run = tables.get("run")
    if not isinstance(run, Mapping):
        return otherwise
    version = run.get("version", 1)
    return version if isinstance(version, int) else otherwise


def _renamed(table: Any, default: str | None = None) -> Any:
    algorithm = table.get("algorithm", {}) if isinstance(table, Mapping) else None
    if not isinstance(algorithm, Mapping):
        return table  # a mistake, which the check of the file reports
    value = algorithm.get("loss_normalization", default)
    if value is None:
        return table
    return {
        **table,
        "algorithm": {**algorithm, "loss_normalization": OVER_INFORMATIVE.get(str(value), value)},
    }
