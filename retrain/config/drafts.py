"""Turns a file's tables into typed sections, even if some of its keys are wrong.

A key with a wrong type or value counts as missing, so that everything else is still checked and every
problem of a file is reported at once: where, what, and how to fix it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import cache, partial
from types import NoneType
from typing import Any, Literal, TypeAlias, get_args, get_origin

from pydantic_core import CoreSchema, SchemaValidator, ValidationError, core_schema

from retrain.base import registry
from retrain.base.errors import LISTS, Location, Problem
from retrain.base.registry import hint
from retrain.config.flow import overlapping
from retrain.config.keys import Key, Tables, keys_of, quote, table_at
from retrain.config.resolve import PLUGINS, RUN_SECTIONS, SECTIONS, hints_of, sections_of
from retrain.config.schema import ConditionSection, Config

PluginProblems: TypeAlias = dict[str, list[Problem]]  # of plugins' own tables, by plugin and table
OnError: TypeAlias = Literal["raise", "default"]
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
    "too_short": ("min_length", "a length of at least"),
    "string_too_short": ("min_length", "a length of at least"),
    "string_too_long": ("max_length", "a length of at most"),
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
    tables: Tables  # as they are in the file
    plugin_problems: PluginProblems | None  # None: build no task, read no file, ask no plugin
    mistakes: tuple[Problem, ...] = ()

    def is_sound(self, *keys: str) -> bool:
        """Whether keys have no problems by themselves; a table's name stands for all of its keys."""
        if not self.mistakes:
            return True
        wrong = [".".join(map(str, mistake.where)) + "." for mistake in self.mistakes]
        return not any(
            one.startswith(f"{key}.") or f"{key}.".startswith(one) for one in wrong for key in keys
        )

    def gives(self, section: str, key: str) -> bool:
        """Whether a key is set explicitly, even to its default."""
        return key in table_at(self.tables, section)


def draft_of(tables: Tables, plugin_problems: PluginProblems | None = None) -> Draft:
    """Return every section typed."""
    tables = overlapping(tables)
    try:
        return Draft(_validator("raise").validate_python(tables), tables, plugin_problems)
    except ValidationError as error:
        problems = [Problem(one["loc"], _explain(one)) for one in error.errors(include_url=False)]
    return Draft(_validator("default").validate_python(tables), tables, plugin_problems, tuple(problems))


@cache
def _validator(on_error: OnError) -> SchemaValidator:
    return SchemaValidator(table_schema(Config, on_error))


def table_schema(kind: Any, on_error: OnError = "raise") -> CoreSchema:
    """Return the schema of a table and the tables in it, from the types and bounds of its keys.

    Built directly, because pydantic's own way from a dataclass to this schema takes 90 ms of every start.

    Args:
        kind: class of the table.
        on_error: what a wrong or unknown key is: an error, or as good as missing.
    """
    declared = []
    for name, key in keys_of(kind).items():
        schema = _value_schema(hints_of(kind)[name], key, on_error)
        value = _with_default(schema, key.default, on_error)
        declared.append(core_schema.dataclass_field(name, value))
    config = core_schema.CoreConfig(
        extra_fields_behavior="forbid" if on_error == "raise" else "ignore", allow_inf_nan=False
    )
    arguments, names = core_schema.dataclass_args_schema(kind.__name__, declared), list(keys_of(kind))
    return core_schema.dataclass_schema(kind, arguments, names, ref=kind.__name__, config=config)


def _with_default(schema: CoreSchema, default: Any, on_error: OnError) -> CoreSchema:
    if is_dataclass(default) or isinstance(default, list | dict):
        return core_schema.with_default_schema(schema, default_factory=type(default), on_error=on_error)
    return core_schema.with_default_schema(schema, default=default, on_error=on_error)


def _value_schema(annotation: Any, key: Key, on_error: OnError) -> CoreSchema:
    """Return the schema of a value of a type; nothing is coerced, and a value of `X | None` is an X."""
    kind, several = get_origin(annotation), [one for one in get_args(annotation) if one is not NoneType]
    if kind is Literal:
        return core_schema.literal_schema(several)
    if kind is dict:
        return core_schema.dict_schema(strict=True)
    if is_dataclass(annotation):
        return table_schema(annotation, on_error)
    if annotation in SIMPLE:
        return SIMPLE[annotation](**key.bounds)
    if kind is list:
        return _list_schema(several[0], key, on_error)
    first, *others = (_value_schema(one, key, on_error) for one in several)
    what = f"needs {key.needs}"
    either = core_schema.union_schema([first, *others], custom_error_type="needs", custom_error_message=what)
    return either if others else first


def _list_schema(item: Any, key: Key, on_error: OnError) -> CoreSchema:
    """Return the schema of a list; bounds other than its length's are those of its items."""
    bounds = {name: limit for name, limit in key.bounds.items() if name != "min_length"}
    schema = _value_schema(item, replace(key, bounds=bounds), on_error)
    if isinstance(item, type) and is_dataclass(item):  # a wrong table counts as empty
        schema = _with_default(schema, item(), on_error)
    return core_schema.list_schema(schema, strict=True, min_length=int(key.bounds.get("min_length", 0)))


def _explain(error: Mapping[str, Any]) -> str:
    """Return the problem and its fix, for one of pydantic's errors."""
    kind, location, what = error["type"], error["loc"], error["msg"]
    if kind == "unexpected_keyword_argument":
        return _unknown_key(location)
    if kind == "list_type" and location in LISTS and isinstance(error["input"], Mapping):
        return f"got a single table; write {LISTS[location]} in double brackets, once for each table"
    if kind in NEEDS:
        what = f"needs {NEEDS[kind]}"
    elif kind in BOUNDS:
        name, words = BOUNDS[kind]
        key = keys_of(_section_class(location[:-1])).get(str(location[-1]))
        because = f", because {key.because}" if key and key.because else ""
        limit = error["ctx"][name]
        what = f"needs {words} {limit if isinstance(limit, int) else f'{limit:g}'}{because}"
    elif kind == "literal_error":
        what = f"needs {error['ctx']['expected']}"
    return f"got {quote(error['input'])}; {what}"


def _unknown_key(location: Location) -> str:
    tables, name = location[:-1], str(location[-1])
    sections = [section for section in SECTIONS if section != "run"]
    names = list(keys_of(_section_class(tables))) if tables else sections
    if options := _options_with(str(tables[-1]) if tables else "", name):
        return f"unknown key; it belongs to [{options}]"
    otherwise = _owners(tables, name, sections) or f"known: {', '.join(names)}"
    return f"unknown {'key' if tables else 'section'}; {hint(name, names, otherwise)}"


def _options_with(section: str, name: str) -> str:
    """Return the table of a section's plugin that a built-in plugin reads a key from; "" if none does."""
    for above, key in PLUGINS:
        if above == section:
            for plugin_name in registry.built_in_names(key.plugin):
                parameters = registry.plugin(key.plugin, plugin_name).parameters or ()
                if any(parameter.name == name for parameter in parameters):
                    return f"{section}.{key.params}"
    return ""


def _owners(tables: Location, name: str, sections: Sequence[str]) -> str:
    """Return where a key belongs that stands in the wrong place; "" if no section has it."""
    if _section_class(tables) is ConditionSection:
        say, places = "write ", {one: f"{one}.{name}" for one in RUN_SECTIONS}
    else:
        say, places = "it belongs to ", {one: f"[{one}]" for one in sections}
    owners = [place for one, place in places.items() if name in keys_of(SECTIONS[one])]
    return say + " or ".join(owners) if owners else ""


def _section_class(tables: Location) -> Any:
    if tables[:2] == ("campaign", "conditions"):
        return ConditionSection
    section: Any = Config
    for table in tables:
        inner = sections_of(section).get(str(table))
        if inner is None:  # a table of free keys
            break
        section = inner
    return section
