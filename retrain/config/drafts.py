"""Turns a file's tables into typed sections, even if some of its keys are wrong.

A key with a wrong type or value counts as missing, so that everything else is still checked and every
problem of a file is reported at once: where, what, and how to fix it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, is_dataclass
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin

from pydantic_core import CoreSchema, SchemaValidator, ValidationError, core_schema

from retrain.config.campaign import Condition
from retrain.config.keys import Key, keys_of, quote
from retrain.config.resolve import SECTIONS, hints_of, sections_of
from retrain.config.schema import Config
from retrain.registry import hint

Location: TypeAlias = tuple[str | int, ...]
Problem: TypeAlias = tuple[Location, str]
Trials: TypeAlias = dict[str, list[tuple[str, str]]]  # by plugin and table: keys and problems
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
SIMPLE: Mapping[Any, Callable[..., CoreSchema]] = {
    int: partial(core_schema.int_schema, strict=True),
    float: partial(core_schema.float_schema, strict=True),
    str: partial(core_schema.str_schema, strict=True),
    bool: partial(core_schema.bool_schema, strict=True),
    Any: core_schema.any_schema,
}


@dataclass(frozen=True)
class Draft:
    """The typed sections of tables, and the problems of single keys."""

    config: Config
    tables: Mapping[str, Any]  # as they are in the file
    trials: Trials | None  # what plugins said of their tables; None: build no task, read no file, ask nobody
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


def draft_of(tables: Mapping[str, Any], trials: Trials | None = None) -> Draft:
    """Return every section typed."""
    try:
        return Draft(_validator().validate_python(tables), tables, trials)
    except ValidationError as error:
        found = error.errors(include_url=False)
    sound = deepcopy(dict(tables))
    for one in found:
        _drop(sound, one["loc"])
    mistakes = [(location, _explain(one, location)) for one in found for location in [_key_of(one["loc"])]]
    return Draft(_validator().validate_python(sound), tables, trials, tuple(dict.fromkeys(mistakes)))


@cache
def _validator() -> SchemaValidator:
    return SchemaValidator(table_schema(Config))


def table_schema(kind: Any) -> CoreSchema:
    """Return the schema of a table and the tables in it, from the types and bounds of its keys.

    Built directly, because pydantic's own way from a dataclass to this schema takes 90 ms of every start.
    """
    hints = hints_of(kind)
    found = [
        core_schema.dataclass_field(name, _with_default(key, value_schema(hints[name], key.bounds)))
        for name, key in keys_of(kind).items()
    ]
    config = core_schema.CoreConfig(extra_fields_behavior="forbid", allow_inf_nan=False)
    arguments, names = core_schema.dataclass_args_schema(kind.__name__, found), list(hints)
    return core_schema.dataclass_schema(kind, arguments, names, ref=kind.__name__, config=config)


def _with_default(key: Key, schema: CoreSchema) -> CoreSchema:
    if is_dataclass(key.default) or isinstance(key.default, list | dict):
        return core_schema.with_default_schema(schema, default_factory=type(key.default))
    return core_schema.with_default_schema(schema, default=key.default)


def value_schema(hint: Any, bounds: Mapping[str, Any]) -> CoreSchema:
    """Return the schema of a value of a type; nothing is coerced, and a value of `X | None` is an X."""
    several = [one for one in get_args(hint) if one is not NoneType]
    if get_origin(hint) is Literal:
        return core_schema.literal_schema(several)
    if get_origin(hint) in (Union, UnionType):
        if len(several) == 1:
            return value_schema(several[0], bounds)
        return core_schema.union_schema([value_schema(one, bounds) for one in several])
    if get_origin(hint) is list:
        return core_schema.list_schema(value_schema(several[0], {}), strict=True)
    if get_origin(hint) is dict:
        return core_schema.dict_schema(strict=True)
    return table_schema(hint) if is_dataclass(hint) else SIMPLE[hint](**bounds)


def _drop(tables: dict[str, Any], location: Location) -> None:
    """Remove the innermost key that contains a mistake; a table in a list becomes empty."""
    holder: Any = tables
    key: Any = location[0]
    for part in location[1:]:
        below = holder[key] if isinstance(holder, list) else holder.get(key)
        if isinstance(below, list):  # a list of anything but tables is dropped whole
            is_inside = isinstance(part, int) and part < len(below) and isinstance(below[part], dict)
        else:
            is_inside = isinstance(below, dict) and part in below
        if not is_inside:
            break
        holder, key = below, part
    if isinstance(holder, list):
        holder[key] = {}
    else:
        holder.pop(key, None)


def place(location: Location) -> str:
    """Write a location as TOML shows it: `[training].lr`, `[algorithm.loss_params].clip_low`."""
    if location[:2] == ("campaign", "conditions") and len(location) > 2:
        here = f"[[campaign.conditions]] #{int(location[2]) + 1}"
        inside = location[3:]
        return here + (f" {place(inside)}" if len(inside) > 1 else "".join(f".{key}" for key in inside))
    *tables, key = [f'"{part}"' if "." in str(part) else str(part) for part in location]
    return f"[{'.'.join(tables)}].{key}" if tables else f"[{key}]"


def _explain(error: Mapping[str, Any], location: Location) -> str:
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


def _key_of(location: Location) -> Location:
    """Return the key of a problem: pydantic's location also names the alternative type that it tried."""
    key = _key(location[:2])
    return location[:2] if key and key.needs else location


def _key(location: Location) -> Key | None:
    return keys_of(_section_class(location[:-1])).get(str(location[-1])) if len(location) > 1 else None
