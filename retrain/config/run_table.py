"""The table of run.toml that no campaign file has: which run of which campaign it is."""

from __future__ import annotations

from dataclasses import dataclass

from retrain.config.keys import Section, Table, key


@dataclass(frozen=True)
class Run(Section, affects="display"):
    """Which run of which campaign this is; written by retrain into run.toml, never by hand."""

    run_id: str = key("", "name of the run's directory")
    campaign: str = key("", "id of the campaign")
    condition: str = key("", "name of the condition")
    config_hash: str = key("", "digest of all that decides the result")
    files: Table = key(dict, "fingerprints of the files that decide it, by key")
    origin: Table = key(dict, "what origin.json holds, from which that can be made again")
    version: int = key(1, "which version's meaning the keys have; 0.1.0's is 1", ge=1)
