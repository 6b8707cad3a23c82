"""Turns a file's tables into typed sections, even if some of its keys are wrong.

A key with a wrong type or value counts as missing, so that everything else is still checked and every
problem of a file is reported at once. This is the only module that needs pydantic.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

from pydantic import TypeAdapter, ValidationError

from retrain.config.problems import Location, explain, key_of
from retrain.config.schema import Config

Problem: TypeAlias = tuple[Location, str]


@dataclass(frozen=True)
class Draft:
    """The typed sections of tables, and the problems of single keys."""

    config: Config
    tables: Mapping[str, Any]  # as they are in the file
    mistakes: tuple[Problem, ...] = ()

    def is_sound(self, *keys: str) -> bool:
        """Whether keys have no problems by themselves; a table's name stands for all of its keys."""
        wrong = [".".join(map(str, location)) + "." for location, _ in self.mistakes]
        return not any(
            one.startswith(f"{key}.") or f"{key}.".startswith(one) for one in wrong for key in keys
        )

    def gives(self, section: str, key: str) -> bool:
        """Whether a key is set explicitly, even to its default."""
        table = self.tables.get(section)
        return isinstance(table, dict) and key in table


def draft_of(tables: Mapping[str, Any]) -> Draft:
    """Return every section typed."""
    try:
        return Draft(adapter().validate_python(tables), tables)
    except ValidationError as error:
        found = error.errors(include_url=False)
    sound = deepcopy(dict(tables))
    for one in found:
        _drop(sound, one["loc"])
    mistakes = [(location, explain(one, location)) for one in found for location in [key_of(one["loc"])]]
    return Draft(adapter().validate_python(sound), tables, tuple(dict.fromkeys(mistakes)))


@cache
def adapter() -> TypeAdapter[Config]:
    """Return the validator of tables against `Config`'s classes."""
    return TypeAdapter(Config)


def _drop(tables: dict[str, Any], location: Location) -> None:
    """Remove the innermost key that contains a mistake; a table in a list becomes empty."""
    holder, key = _innermost(tables, location)
    if isinstance(holder, list):
        holder[key] = {}
    else:
        holder.pop(key, None)


def _innermost(tables: dict[str, Any], location: Location) -> tuple[Any, Any]:
    holder: Any = tables
    key: Any = location[0]
    for part in location[1:]:
        below = holder[key] if isinstance(holder, list) else holder.get(key)
        if not _holds(below, part):
            break
        holder, key = below, part
    return holder, key


def _holds(below: Any, part: str | int) -> bool:
    if isinstance(below, list):  # a list of anything but tables is dropped whole
        return isinstance(part, int) and part < len(below) and isinstance(below[part], dict)
    return isinstance(below, dict) and part in below
