"""Change keys of one table of a TOML file, and nothing else of its text."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping

import tomli_w

from retrain.base.errors import ConfigError
from retrain.config.keys import Table

BOM = "\ufeff"
TABLE = re.compile(r"\s*\[.*\]\s*(#.*)?$")  # a line that begins one


def with_keys(text: str, name: str, table: str, keys: Mapping[str, object]) -> str:
    """Return a file's text with keys of a table set; order and all other lines stay.

    A comment on the line of a value that changes goes with it, as it may be about that value.

    Args:
        name: of the file, for errors.

    Raises:
        ConfigError: the table is not written as `[table]`, or its lines cannot be told apart.
    """
    before = tomllib.loads(text.removeprefix(BOM))
    end = "\r\n" if "\r\n" in text else "\n"
    lines = text.split(end)
    header = re.compile(rf"{BOM}?\s*\[\s*{table}\s*\]\s*(#.*)?")
    start = next((number for number, line in enumerate(lines) if header.fullmatch(line)), None)
    if start is None:
        how = "is written in another way" if table in before else "is not in this file"
        raise ConfigError(f"{name} [{table}]: {how}, so it cannot be edited; write its keys by hand")
    for key, value in keys.items():
        if key in before[table] and before[table][key] == value:
            continue
        following = range(start + 1, len(lines))
        stop = next((number for number in following if TABLE.match(lines[number])), len(lines))
        written = tomli_w.dumps({key: value}, multiline_strings=False).strip()
        written = re.sub(r"\[\s+", "[", re.sub(r",?\s+\]", "]", re.sub(r",\s+", ", ", written)))
        place = next((n for n in range(start + 1, stop) if re.match(rf"\s*{key}\s*=", lines[n])), None)
        if place is None:
            while stop > start + 1 and not lines[stop - 1].strip():
                stop -= 1  # before the empty lines that divide tables
            lines.insert(stop, written)
            continue
        ends = range(place + 1, stop + 1)
        end_of_value = next((n for n in ends if _parsed("\n".join(lines[place:n])) is not None), place + 1)
        lines[place:end_of_value] = [written]
    changed = end.join(lines)
    if _parsed(changed.removeprefix(BOM)) != before | {table: before[table] | dict(keys)}:
        raise ConfigError(
            f"{name} [{table}]: its lines could not be told apart; write {', '.join(keys)} by hand"
        )
    return changed


def _parsed(text: str) -> Table | None:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return None
