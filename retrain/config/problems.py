"""Turns a validator's errors into lines that say where, what and how to fix it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from retrain.config.campaign import Condition
from retrain.config.keys import Key, keys_of
from retrain.config.resolve import SECTIONS, sections_of
from retrain.config.schema import Config
from retrain.registry import hint

Location: TypeAlias = tuple[str | int, ...]
NEEDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string in quotes",
    "list_type": "a list in [brackets]",
    "dict_type": "a table",
    "dataclass_type": "a table",
    "finite_number": "a finite number",
}
BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
    "string_too_short": ("min_length", "a length of at least"),
    "string_too_long": ("max_length", "a length of at most"),
}
GONE: dict[Location, str] = {
    ("campaign", "ray", "share_seconds"): "the driver submits each run as a task of its own",
}
LONGEST_QUOTE = 60  # characters of a wrong value that a message repeats


def place(location: Location) -> str:
    """Write a location as TOML shows it: `[training].lr`, `[algorithm.loss_params].clip_low`."""
    if location[:2] == ("campaign", "conditions") and len(location) > 2:
        here = f"[[campaign.conditions]] #{int(location[2]) + 1}"
        inside = location[3:]
        return here + (f" {place(inside)}" if len(inside) > 1 else "".join(f".{key}" for key in inside))
    *tables, key = [f'"{part}"' if "." in str(part) else str(part) for part in location]
    return f"[{'.'.join(tables)}].{key}" if tables else f"[{key}]"


def explain(error: Mapping[str, Any], location: Location) -> str:
    """Return the problem and its fix, for one of pydantic's errors."""
    kind, key = error["type"], _key(location)
    if kind == "unexpected_keyword_argument":
        return _unknown_key(location)
    what = error["msg"]
    if key and key.needs:
        what = f"needs {key.needs}"
    elif kind in NEEDS:
        what = f"needs {NEEDS[kind]}"
    elif kind in BOUNDS:
        name, words = BOUNDS[kind]
        because = f", because {key.because}" if key and key.because else ""
        what = f"needs {words} {error['ctx'][name]:g}{because}"
    elif kind == "literal_error":
        what = f"needs {error['ctx']['expected']}"
    return f"got {quote(error['input'])}; {what}"


def _unknown_key(location: Location) -> str:
    if location in GONE:
        return f"no longer a key, because {GONE[location]}; remove it"
    tables = location[:-1]
    known = list(keys_of(_section_class(tables))) if tables else [name for name in SECTIONS if name != "run"]
    what = "section" if len(location) == 1 else "key"
    return f"unknown {what}; " + hint(str(location[-1]), known, f"known: {', '.join(known)}")


def quote(value: object) -> str:
    """Return a value as written in TOML, shortened."""
    if isinstance(value, bool):
        return str(value).lower()
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    return text if len(text) <= LONGEST_QUOTE else text[: LONGEST_QUOTE - 1] + "…"


def _section_class(tables: Location) -> Any:
    if tables[:2] == ("campaign", "conditions"):
        return Condition
    here: Any = Config
    for table in tables:
        inner = sections_of(here).get(str(table))
        if inner is None:  # a table of free keys
            break
        here = inner
    return here


def key_of(location: Location) -> Location:
    """Return the key of a problem: pydantic's location also names the alternative type that it tried."""
    key = _key(location[:2])
    return location[:2] if key and key.needs else location


def _key(location: Location) -> Key | None:
    return keys_of(_section_class(location[:-1])).get(str(location[-1])) if len(location) > 1 else None
