"""The table of a launcher that is not built in: `[campaign.<launcher>]`, checked like any plugin's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from retrain import registry
from retrain.config.schema import Campaign
from retrain.config.trials import trial_problems

KEYS = frozenset(field.name for field in fields(Campaign))
OPTIONS = "launcher_options"


def with_launcher_options(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Move `[campaign.<launcher>]` to where it is kept, and drop those of launchers that are not used."""
    campaign = raw.get("campaign")
    if not isinstance(campaign, dict):
        return raw
    named = campaign.get("launcher")
    others = {key for key, table in campaign.items() if isinstance(table, dict) and _is_launcher(key)}
    if not others:
        return raw
    kept = {key: value for key, value in campaign.items() if key not in others}
    if named in others:
        kept[OPTIONS] = campaign[named]
    return {**raw, "campaign": kept}


def launcher_problems(
    campaign: Mapping[str, Any], try_plugins: bool
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Iterate over (location, problem) pairs of the launcher's name and table."""
    name = campaign.get("launcher", Campaign.launcher)
    if not isinstance(name, str):
        return
    if what := registry.problem_with_name("launchers", name):
        yield ("campaign", "launcher"), what
        return
    table = campaign.get(OPTIONS, {})
    if not isinstance(table, dict):
        return
    found = registry.problems_with_params("launchers", name, table)
    if not found and try_plugins and name not in KEYS:  # a table of ours is a section with types
        found = list(trial_problems("launchers", name, table, None))
    yield from ((("campaign", name, key) if key else ("campaign", "launcher"), what) for key, what in found)


def _is_launcher(key: str) -> bool:
    return key not in KEYS and ("." in key or key in registry.names("launchers"))
