"""The table `[run]`, only in run.toml: which run of which campaign it is."""

from __future__ import annotations

from dataclasses import dataclass

from retrain.config.keys import Section, Table, key


@dataclass(frozen=True)
class Run(Section, affects="display"):
    """Which run of which campaign this is; written by retrain into run.toml, never by hand."""

    run_id: str = key("", "name of the run's directory")
    campaign: str = key("", "id of the campaign")
    condition: str = key("", "name of the condition")
    config_hash: str = key("", "digest of everything that decides the result")
    files: Table = key(dict, "fingerprints of the files that decide the result, by key")
    origin: Table = key(dict, "contents of origin.json, from which it can be restored")
    version: int = key(1, "version of the keys' meanings; 0.1.0 is 1", ge=1)
