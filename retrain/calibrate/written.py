"""Writes a calibrated file: the user's values with the changes, and above each change why."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import tomli_w

from retrain.calibrate.advice import Advice
from retrain.config.json_schema import DIRECTIVE
from retrain.errors import ConfigError, RecordsError
from retrain.records.text import plain

MARK = "# Calibrated from "
MOST_READ = 1000  # bytes of a line


def calibrated(tables: Mapping[str, Any], advice: Sequence[Advice]) -> dict[str, Any]:
    """Return the tables with the advised values; comments of the original are lost."""
    changed = deepcopy(dict(tables))
    for one in _changes(advice):
        section, _, key = one.key.partition(".")
        changed.setdefault(section, {})[key] = one.value
    return changed


def to_toml(
    tables: Mapping[str, Any],
    advice: Sequence[Advice],
    source: str,
    overrides: Sequence[str] = (),
    schema: str = "",
) -> str:
    """Return the calibrated file: a comment above each changed key, and the `--set` overrides at the top.

    `tables` are the original's, with the overrides; `schema` is its directive for editors, if it has one.
    """
    lines = [
        *([schema] if schema else []),
        f"{MARK}{plain(source)}: a comment above each changed value gives the reason.",
        *(f"# with --set {plain(override)}" for override in overrides),
        "",
        *tomli_w.dumps(calibrated(tables, advice)).splitlines(),
    ]
    for one in _changes(advice):
        section, _, key = one.key.partition(".")
        start = lines.index(f"[{section}]")
        at = next(n for n in range(start, len(lines)) if re.match(rf"{re.escape(key)}\s*=", lines[n]))
        lines.insert(at, f"# was {_shown(one.now)}: {plain(one.why)}")
    return "\n".join(lines) + "\n"


def check_target(target: Path, source: Path) -> None:
    """Check, before anything runs, that the target may be written.

    Raises:
        ConfigError: it is the file being calibrated, or was not written by a calibration.
        RecordsError: its directory cannot be written to.
    """
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise RecordsError(
            f"{target}: its directory does not exist or is not writable; choose another with --output"
        )
    if not target.exists():
        return
    if target.samefile(source):
        raise ConfigError(f"{target}: is the file being calibrated; choose another --output")
    if not target.is_file() or not any(line.startswith(MARK.encode()) for line in _first_lines(target)):
        raise ConfigError(f"{target}: was not written by a calibration; move it, or choose another --output")
    if not os.access(target, os.W_OK):
        raise RecordsError(f"{target}: is not writable; choose another with --output")


def schema_line(source: Path) -> str:
    """Return the schema directive for editors, if a file begins with one."""
    first = _first_lines(source)[0].decode("utf-8-sig", "replace").strip()
    return plain(first) if first.startswith(DIRECTIVE.partition(" ")[0]) else ""


def _first_lines(path: Path) -> list[bytes]:
    with path.open("rb") as file:
        return [file.readline(MOST_READ), file.readline(MOST_READ)]


def _changes(advice: Sequence[Advice]) -> list[Advice]:
    return [one for one in advice if one.is_change and one.is_written]


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
