"""The configuration reference, read off the schema's classes."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from retrain.config.schema import Condition, Config


@dataclass(frozen=True)
class KeyReference:
    """One key: what may stand there and what it means."""

    name: str
    type: str
    default: str
    description: str


@dataclass(frozen=True)
class SectionReference:
    """One table and its keys."""

    name: str
    description: str
    keys: tuple[KeyReference, ...]


def sections() -> list[SectionReference]:
    """Describe every table of a campaign file, in the order of the schema."""
    hints = get_type_hints(Config)
    classes = [
        (
            field.name,
            next(c for c in (hints[field.name], *get_args(hints[field.name])) if dataclasses.is_dataclass(c)),
        )
        for field in dataclasses.fields(Config)
        if field.name != "run"
    ]
    return [_section(name, kind) for name, kind in [*classes, ("[campaign.conditions]", Condition)]]


def _section(name: str, kind: Any) -> SectionReference:
    keys = tuple(
        KeyReference(f.name, _type(str(f.type)), _default(f), f.metadata["description"])
        for f in dataclasses.fields(kind)
    )
    return SectionReference(name, inspect.getdoc(kind) or "", keys)


def _type(annotation: str) -> str:
    plain = annotation.removesuffix(" | None").replace("list[Any]", "list[int]")
    return {"Table": "table", "str": "string"}.get(plain, plain)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "{}"
    if field.default is None:
        return "-"
    return str(field.default).lower() if isinstance(field.default, bool) else repr(field.default)
