"""How a key of a TOML table is declared: its default, what it means, and what it may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

LARGEST_COUNT = 10**9  # far above any sane count; products of two still fit an int64
LARGEST_PERMITS = 512

Table = dict[str, Any]
Normalization: TypeAlias = Literal[
    "token", "sequence", "constant", "informative_token", "informative_sequence", "informative_constant"
]


def key(default: Any, description: str, **constraints: Any) -> Any:
    """Declare a key: its default, what it means, and pydantic's constraints (ge, le, gt, lt, max_length)."""
    return declare(default, description, strict=True, **constraints)


def count(default: int | None, description: str, least: int = 1, **constraints: Any) -> Any:
    """Declare a key that counts something."""
    return key(default, description, ge=least, le=LARGEST_COUNT, **constraints)


def declare(default: Any, description: str, **constraints: Any) -> Any:
    """Declare a key that must not be marked strict: a choice, or a table (TOML gives dicts).

    Beside pydantic's constraints: `affects` (see `affects`), `path="file"` or `"directory"` for a value
    that names one, and `was`, the key's first default, where a later version has another.
    """
    metadata = {"description": description, **constraints}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Between:
    """Bounds of a whole number that is one of several things a key may hold."""

    least: int
    most: int

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Table:
        """Add them to pydantic's idea of the number."""
        return {**handler(source), "strict": True, "ge": self.least, "le": self.most}


Permits: TypeAlias = Annotated[int, Between(1, LARGEST_PERMITS)] | Literal["auto"]


Effect: TypeAlias = Literal["result", "time", "schedule", "display"]


class Section:
    """A TOML table: unknown keys are errors and nothing is coerced."""

    __pydantic_config__: ClassVar[Table] = {"extra": "forbid", "allow_inf_nan": False}
    __affects__: ClassVar[Effect] = "result"

    def __init_subclass__(cls, affects: Effect = "result") -> None:
        """Declare what the keys of a table affect that do not say so themselves."""
        cls.__affects__ = affects


def affects(section: Section | type[Section], field: Field[Any]) -> Effect:
    """Return what a key can change: a run's result, its time, when and where it runs, or what is shown."""
    found: Effect = field.metadata.get("affects", section.__affects__)
    return found
