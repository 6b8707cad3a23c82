"""How a key of a TOML table is declared (default, meaning, allowed values), and what it meant earlier."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, Literal, TypeAlias, dataclass_transform

from retrain.base.errors import ConfigError, as_key

LARGEST_COUNT = 10**9  # far above any sane count; products of two still fit an int64
LARGEST_PERMITS = 512
LONGEST_QUOTE = 60  # characters of a wrong value that a message repeats
UNCHANGED: Any = object()

Table = dict[str, Any]
Tables: TypeAlias = Mapping[str, Any]  # of a TOML file; what is in them is as it was written
Normalization: TypeAlias = Literal[
    "token", "sequence", "constant", "informative_token", "informative_sequence", "informative_constant"
]
Effect: TypeAlias = Literal["result", "time", "schedule", "display"]
Permits: TypeAlias = int | Literal["auto"]
Stall: TypeAlias = float | Literal["auto"]
Over: TypeAlias = list[float] | Literal["whole", "last"]
Finish: TypeAlias = bool | Literal["reference and winner"]

# If a key's meaning changes but not its name, `CURRENT` increases, and `UPGRADES` says the same in today's
# words. The number is written into run.toml and origin.json; digests are of what was written.
CURRENT = 5  # since 0.2.0
UPGRADES: dict[int, Callable[[Table], Table]] = {}  # by number: to the next number's meanings


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a TOML table: everything that its field declares."""

    name: str
    annotation: str
    default: Any
    description: str
    bounds: Mapping[str, float]
    affects: Effect  # what it can change: a run's result, its time, when and where it runs, or what is shown
    plugin: str = ""  # kind of the plugin that the value names
    params: str = ""  # key of the same table that holds the plugin's parameters
    path: Literal["", "file", "directory", "adapter", "teacher"] = ""  # what the value names, if it is a path
    stands_for: str = ""  # dotted key that this one replaces
    because: str = ""  # why it has its bounds, for the error
    needs: str = ""  # allowed values, for the error, if there are several types
    was: Any = UNCHANGED  # its first default, if a later version changed it

    @property
    def help(self) -> str:
        """Return the description, with what the key affects if that is not the result."""
        return self.description + (f" (affects: {self.affects})" if self.affects != "result" else "")

    @property
    def first_default(self) -> Any:
        """Return the default when the key was introduced, which digests leave out."""
        return self.default if self.was is UNCHANGED else self.was


BOUNDS = ("ge", "gt", "le", "lt", "min_length", "max_length")
DECLARED = {declared.name for declared in fields(Key) if declared.default is not MISSING}


def key(default: Any, description: str, **declared: Any) -> Any:
    """Declare a key: its default, and what it means.

    Args:
        default: its value, or the type that makes it: a list, a dict, a table's class.
        description: shown by `retrain schema` and by editors.
        declared: bounds (`BOUNDS`), what the key `affects`, and the optional fields of `Key`.
    """
    metadata = {"description": description, **declared}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def count(default: int | None, description: str, least: int = 1, **constraints: Any) -> Any:
    """Declare a key that counts something."""
    return key(default, description, ge=least, le=LARGEST_COUNT, **constraints)


def plugin(default: Any, kind: str, params: str, description: str) -> Any:
    """Declare a key that names a plugin of a kind; the key `params` holds the plugin's parameters."""
    return key(default, f"{description}; `retrain plugins {kind}` lists all", plugin=kind, params=params)


@dataclass(frozen=True)
class Proposal:
    """A point of a sweep that a sampler proposed, of one of the file's conditions."""

    point: Table  # values by dotted key
    number: int = 1  # of the condition in the file; 1 as well for a file without conditions


@dataclass_transform(frozen_default=True)
class Section:
    """A section of a TOML file, its values typed: unknown keys are errors and nothing is coerced.

    Each subclass is a frozen dataclass. Its methods are here, once, because making those of 24 tables takes
    a tenth of the time in which a command starts.
    """

    __affects__: ClassVar[Effect] = "result"
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def __init_subclass__(cls, affects: Effect = "result") -> None:
        """Declare what the keys of a table affect, unless they declare it themselves."""
        cls.__affects__ = affects
        dataclass(init=False, repr=False, eq=False)(cls)

    def __init__(self, *positional: Any, **values: Any) -> None:
        declared = self.__dataclass_fields__
        values.update(zip(declared, positional, strict=False))
        if unknown := values.keys() - declared.keys():
            raise TypeError(f"{type(self).__name__} has no key {', '.join(sorted(unknown))}")
        for name, key in declared.items():
            if name not in values:
                values[name] = key.default if key.default_factory is MISSING else key.default_factory()
            self.__dict__[name] = values[name]

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({values})"

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")


@cache
def keys_of(section: Any) -> Mapping[str, Key]:
    """Return the keys of a table by name, in the order of their declaration."""
    keys = {}
    for declared in fields(section):
        says = declared.metadata
        keys[declared.name] = Key(
            name=declared.name,
            annotation=str(declared.type),
            default=declared.default if declared.default_factory is MISSING else declared.default_factory(),
            description=says["description"],
            bounds={name: says[name] for name in BOUNDS if name in says},
            affects=says.get("affects", section.__affects__),
            **{name: says[name] for name in DECLARED & says.keys()},
        )
    return keys


def table_at(tables: Tables, *keys: str) -> Tables:
    """Return the table at these keys of a file; empty if there is none."""
    table: Any = tables
    for name in keys:
        table = table.get(name) if isinstance(table, Mapping) else None
    return table if isinstance(table, Mapping) else {}


def put(table: Table, keys: Sequence[str], value: Any, *, replaces: bool = False) -> bool:
    """Set a value in tables; False if a value is in the way, or there already unless it `replaces` that."""
    *tables, last = keys
    for part in tables:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            return False
    if last in table and not replaces:
        return False
    table[last] = value
    return True


def as_toml(value: object) -> str:
    """Return a value as TOML writes it; "unset" for None, which TOML has not."""
    if isinstance(value, dict):
        inside = ", ".join(f"{as_key(key)} = {as_toml(inner)}" for key, inner in value.items())
        return f"{{ {inside} }}" if inside else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_toml, value))}]"
    if isinstance(value, bool) or value is None:
        return "unset" if value is None else str(value).lower()
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)


def quote(value: object) -> str:
    """Return a value as TOML writes it, shortened."""
    text = as_toml(value)
    return text if len(text) <= LONGEST_QUOTE else text[: LONGEST_QUOTE - 1] + "…"


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
    version = table_at(tables, "run").get("version")
    return version if isinstance(version, int) else otherwise
