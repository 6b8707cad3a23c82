"""How a key of a TOML table is declared: its default, its meaning, and its allowed values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

LARGEST_COUNT = 10**9  # far above any sane count; products of two still fit an int64
LARGEST_PERMITS = 512
UNCHANGED: Any = object()

Table = dict[str, Any]
Normalization: TypeAlias = Literal[
    "token", "sequence", "constant", "informative_token", "informative_sequence", "informative_constant"
]


Effect: TypeAlias = Literal["result", "time", "schedule", "display"]


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a key's declaration says beyond its type, default, description and bounds."""

    affects: Effect | None = None  # None: what its table affects
    plugin: str = ""  # kind of the plugin that the value names
    params: str = ""  # key of the same table that holds the plugin's parameters
    path: Literal["", "file", "directory"] = ""  # what the value names, if it is a path
    stands_for: str = ""  # dotted key that this one replaces
    because: str = ""  # why it has its bounds, for the error
    needs: str = ""  # allowed values, for the error, if there are several types
    was: Any = UNCHANGED  # its first default, if a later version changed it


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a TOML table: everything that its field declares."""

    name: str
    annotation: str
    default: Any
    description: str
    bounds: Mapping[str, float]
    affects: Effect  # what it can change: a run's result, its time, when and where it runs, or what is shown
    means: Meaning

    @property
    def help(self) -> str:
        """Return the description, with what the key affects if that is not the result."""
        return self.description + (f" (affects: {self.affects})" if self.affects != "result" else "")

    @property
    def first_default(self) -> Any:
        """Return the default when the key was introduced, which digests leave out."""
        return self.default if self.means.was is UNCHANGED else self.means.was


def key(default: Any, description: str, **constraints: Any) -> Any:
    """Declare a key: its default, what it means, and pydantic's constraints (ge, le, gt, lt, max_length)."""
    return declare(default, description, strict=True, **constraints)


def count(default: int | None, description: str, least: int = 1, **constraints: Any) -> Any:
    """Declare a key that counts something."""
    return key(default, description, ge=least, le=LARGEST_COUNT, **constraints)


def permits(default: Any, description: str, **constraints: Any) -> Any:
    """Declare a key of type `Permits`."""
    needs = f'a whole number from 1 to {LARGEST_PERMITS}, or "auto"'
    return declare(default, description, needs=needs, **constraints)


def plugin(default: Any, kind: str, params: str, description: str) -> Any:
    """Declare a key that names a plugin of a kind; the key `params` holds the plugin's parameters."""
    listed = f"{description}; `retrain plugins {kind}` lists all"
    return declare(default, listed, strict=True, plugin=kind, params=params)


def declare(default: Any, description: str, **constraints: Any) -> Any:
    """Declare a key that must not be marked strict: a choice, or a table (TOML gives dicts).

    Beside pydantic's constraints: the fields of `Meaning`.
    """
    means = Meaning(**{name: constraints.pop(name) for name in MEANINGS & constraints.keys()})
    metadata = {"description": description, "means": means, **constraints}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


MEANINGS = {declared.name for declared in fields(Meaning)}


@dataclass(frozen=True)
class Between:
    """Bounds of a whole number, for a key that also allows other types."""

    least: int
    most: int

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Table:
        """Return pydantic's schema of the number with these bounds."""
        return {**handler(source), "strict": True, "ge": self.least, "le": self.most}


Permits: TypeAlias = Annotated[int, Between(1, LARGEST_PERMITS)] | Literal["auto"]


class Section:
    """A TOML table: unknown keys are errors and nothing is coerced."""

    __pydantic_config__: ClassVar[Table] = {"extra": "forbid", "allow_inf_nan": False}
    __affects__: ClassVar[Effect] = "result"

    def __init_subclass__(cls, affects: Effect = "result") -> None:
        """Declare what the keys of a table affect, unless they declare it themselves."""
        cls.__affects__ = affects


@cache
def keys_of(section: Any) -> Mapping[str, Key]:
    """Return the keys of a table by name, in the order of their declaration."""
    found = {}
    for declared in fields(section):
        says, means = declared.metadata, declared.metadata["means"]
        found[declared.name] = Key(
            name=declared.name,
            annotation=str(declared.type),
            default=declared.default if declared.default_factory is MISSING else declared.default_factory(),
            description=says["description"],
            bounds={name: says[name] for name in ("ge", "gt", "le", "lt") if name in says},
            affects=means.affects or section.__affects__,
            means=means,
        )
    return found
