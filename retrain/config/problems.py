"""Turns a validator's errors into lines that say where, what and how to fix it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from retrain.config.keys import Meaning, keys_of
from retrain.config.resolve import SECTIONS, sections_of
from retrain.config.schema import Condition, Config
from retrain.registry import nearest

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
    kind = error["type"]
    if needs := _meaning(location).needs:
        return f"got {quote(error['input'])}; needs {needs}"
    if kind == "unexpected_keyword_argument":
        return unknown_key(location)
    if kind in NEEDS:
        return f"got {quote(error['input'])}; needs {NEEDS[kind]}"
    if kind in BOUNDS:
        name, words = BOUNDS[kind]
        return f"got {quote(error['input'])}; needs {words} {error['ctx'][name]:g}{_because(location)}"
    if kind == "literal_error":
        return f"got {quote(error['input'])}; needs {error['ctx']['expected']}"
    return f"got {quote(error['input'])}; {error['msg']}"


def unknown_key(location: Location) -> str:
    """Return the message for an unknown key or section, with the nearest known name."""
    if location in GONE:
        return f"no longer a key, because {GONE[location]}; remove it"
    known = list(_keys(location[:-1]))
    near = nearest(str(location[-1]), known)
    what = "section" if len(location) == 1 else "key"
    return f"unknown {what}; " + (f"did you mean {near!r}?" if near else f"known: {', '.join(known)}")


def quote(value: object) -> str:
    """Return a value as written in TOML, shortened."""
    if isinstance(value, bool):
        return str(value).lower()
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    return text if len(text) <= LONGEST_QUOTE else text[: LONGEST_QUOTE - 1] + "…"


def _keys(tables: Location) -> list[str]:
    if not tables:
        return [name for name in SECTIONS if name != "run"]
    return list(keys_of(_section_class(tables)))


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
    return location[:2] if _meaning(location[:2]).needs else location


def _because(location: Location) -> str:
    because = _meaning(location).because
    return f", because {because}" if because else ""


def _meaning(location: Location) -> Meaning:
    """Return a key's declaration beyond its type and bounds."""
    known = keys_of(_section_class(location[:-1])) if len(location) > 1 else {}
    found = known.get(str(location[-1]))
    return found.means if found else Meaning()
