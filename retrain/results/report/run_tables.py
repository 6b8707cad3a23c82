"""Reads the run.toml of a campaign's runs; of runs that differ in their seed only, one is parsed.

Their texts differ in three values: the seed, the run's id and the digest of its configuration. A text that is
equal in all other bytes to one that was parsed has the same tables, but for these.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Callable

from retrain.config.digest import is_edited, recorded_digest_by_seed
from retrain.config.keys import Tables
from retrain.records.files import read_small, readable
from retrain.records.layout import RunFiles

_TEXT = r'"([^"\\\x00-\x1f\x7f]*)"\n'  # which stands for itself
_BY_SEED = tuple(
    re.compile(rf"^{line}", re.MULTILINE)
    for line in (
        r"\[training\]\nseed = (0|[1-9]\d{0,15})\n",
        rf"\[run\]\nrun_id = {_TEXT}",
        rf"config_hash = {_TEXT}",
    )
)
_LONG_TEXTS = ('"""', "'''")  # may hold lines that look like keys


class RunTables:
    """The tables of each run.toml that is asked for."""

    def __init__(self) -> None:
        self._parsed: dict[bytes, tuple[Tables, Callable[[int], str]]] = {}  # by a digest of the common text

    def of(self, files: RunFiles) -> tuple[Tables, bool]:
        """Return a run's tables, empty if they cannot be read, and whether they were edited."""
        try:
            text = (readable(read_small, files.run_toml) or b"").decode("utf-8-sig")
            return self._of_text(text)
        except (ValueError, RecursionError):
            return {}, False

    def _of_text(self, text: str) -> tuple[Tables, bool]:
        places = [place for line in _BY_SEED for place in line.finditer(text)]
        if len(places) != len(_BY_SEED) or any(quotes in text for quotes in _LONG_TEXTS):
            tables = tomllib.loads(text)
            return tables, is_edited(tables)
        (seed, run_id, config_hash), common = (place[1] for place in places), text
        for place in reversed(places):
            common = common[: place.start(1)] + common[place.end(1) :]
        key = hashlib.sha256(common.encode()).digest()
        if key not in self._parsed:
            tables = tomllib.loads(text)
            self._parsed[key] = tables, recorded_digest_by_seed(tables)
        first, digest_of = self._parsed[key]
        tables = {
            **first,
            "training": {**first["training"], "seed": int(seed)},
            "run": {**first["run"], "run_id": run_id, "config_hash": config_hash},
        }
        is_changed = digest_of(int(seed)) != config_hash and is_edited(tables)
        return tables, is_changed
