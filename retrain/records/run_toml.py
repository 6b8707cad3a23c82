"""Reads run.toml: which runs have one, and its content if it can be read."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from retrain.errors import RecordsError, records_error
from retrain.records.files import read_small
from retrain.records.layout import CampaignFiles, RunFiles, is_single_run

CONFIG_HASH = re.compile(
    rb'^config_hash = "((?:v\d+:)?[0-9a-f]+)"$', re.MULTILINE
)  # parsing TOML takes 30 times longer


def recorded_hash(files: RunFiles) -> str:
    """Return the hash of the configuration in a run's run.toml; "" if it cannot be read."""
    try:
        found = CONFIG_HASH.findall(files.run_toml.read_bytes())
    except OSError:
        return ""
    return found[-1].decode() if found else ""  # [run] is the last table


def recorded_tables(files: RunFiles) -> dict[str, Any]:
    """Return a run's run.toml; empty if it cannot be read."""
    try:
        return tomllib.loads((read_small(files.run_toml) or b"").decode("utf-8-sig"))
    except (RecordsError, ValueError, RecursionError):
        return {}


def files_of_runs(files: CampaignFiles) -> dict[str, RunFiles]:
    """Return the files of every run that has a directory, by run id.

    Raises:
        RecordsError: the directories cannot be listed.
    """
    if is_single_run(files.directory):
        alone = RunFiles(files.directory)
        return {str(recorded_tables(alone).get("run", {}).get("run_id", files.directory.name)): alone}
    try:
        found = sorted(files.runs.iterdir()) if files.runs.is_dir() else []
    except OSError as error:
        raise records_error(files.runs, "list", error) from error
    return {path.name: RunFiles(path) for path in found if path.is_dir()}
