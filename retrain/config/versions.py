"""What a file says stays what it said when its campaign began, whatever its keys mean since.

If a key's meaning changes but not its name, `CURRENT` increases, and `UPGRADES` says the same in today's
words. The number is written into run.toml and origin.json; digests are of what was written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from retrain.base.errors import ConfigError
from retrain.config.keys import Table, Tables

CURRENT = 4  # since 0.2.0
UPGRADES: dict[int, Callable[[Table], Table]] = {}  # by number: tables with the meanings of the next number


def as_meant(tables: Tables, otherwise: int = CURRENT) -> Table:
    """Return tables that say today what a file's tables said when it was written.

    `otherwise` is the number of a file that is no run.toml.

    Raises ConfigError for the number of a version that this one does not read.
    """
    written = run_version(tables, otherwise)
    numbers = range(written, CURRENT)
    if written > CURRENT or not all(number in UPGRADES for number in numbers):
        raise ConfigError(
            f"version {written} of the meanings of keys, but this retrain reads "
            f"{min(UPGRADES, default=CURRENT)} to {CURRENT}; use the retrain that began the campaign"
        )
    meant = dict(tables)
    for number in numbers:
        meant = UPGRADES[number](meant)
    return meant


def run_version(tables: Tables, otherwise: int) -> int:
    """Return the number in a run.toml; `otherwise` for any other file."""
    run = tables.get("run")
    version = run.get("version") if isinstance(run, Mapping) else None
    return version if isinstance(version, int) else otherwise
