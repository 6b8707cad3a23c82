"""The configuration reference, read off the schema's classes."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from retrain.config.keys import LARGEST_COUNT, Normalization
from retrain.config.schema import Campaign, Condition, Config

BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
PREFACE = """\
# Configuration

Every table and key of a campaign's TOML file, with its default. `retrain schema --markdown` prints this
page, `retrain schema --keys` the same as a table, and `retrain schema` the JSON Schema for editors. A key
that is not here is an error, and nothing is coerced: `3.9` is not an int and `"false"` is not a bool.
"""


@dataclass(frozen=True)
class KeyReference:
    """One key: what may stand there and what it means."""

    name: str
    type: str
    default: str
    description: str
    bounds: str = ""


@dataclass(frozen=True)
class SectionReference:
    """One table and its keys."""

    name: str
    description: str
    keys: tuple[KeyReference, ...]


def sections() -> list[SectionReference]:
    """Describe every table of a campaign file, in the order of the schema."""
    classes = [(name, kind) for name, kind in _tables(Config) if name != "run"]
    inner = [(f"campaign.{name}", kind) for name, kind in _tables(Campaign)]
    return [_section(name, kind) for name, kind in [*classes, *inner, ("[campaign.conditions]", Condition)]]


def _tables(section: Any) -> list[tuple[str, Any]]:
    found = []
    for name, hint in get_type_hints(section).items():
        kind = next((c for c in (hint, *get_args(hint)) if dataclasses.is_dataclass(c)), None)
        found += [(name, kind)] if kind is not None else []
    return found


def markdown() -> str:
    """Write the reference as a page: one heading per table, one row per key."""
    return PREFACE + "".join(line for section in sections() for line in _page(section))


def _page(section: SectionReference) -> Iterator[str]:
    yield f"\n## `[{section.name}]`\n\n{section.description}\n\n"
    yield "| key | type | default | meaning |\n|---|---|---|---|\n"
    for key in section.keys:
        kind = _cell(key.type + (f", {key.bounds}" if key.bounds else ""))
        yield f"| `{key.name}` | {kind} | `{key.default}` | {_cell(key.description)} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _section(name: str, kind: Any) -> SectionReference:
    keys = tuple(
        KeyReference(f.name, _type(str(f.type)), _default(f), f.metadata["description"], _bounds(f.metadata))
        for f in dataclasses.fields(kind)
    )
    return SectionReference(name, inspect.getdoc(kind) or "", keys)


def _type(annotation: str) -> str:
    plain = annotation.removesuffix(" | None").replace("list[Any]", "list[int]")
    plain = re.sub(r"Literal\[(.*?)\]", lambda found: found[1].replace("'", '"').replace(", ", " or "), plain)
    normalizations = " or ".join(f'"{name}"' for name in get_args(Normalization))
    aliases = {"Table": "table", "str": "string", "Permits": 'int or "auto"', "Normalization": normalizations}
    return aliases.get(plain, plain)


def _bounds(constraints: Mapping[str, Any]) -> str:
    said = {
        name: f"{words} {constraints[name]:,}"
        for name, words in BOUNDS.items()
        if abs(constraints.get(name, math.inf)) < LARGEST_COUNT  # larger ones only keep arithmetic sane
    }
    return " and ".join(said.values())


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "[]" if field.default_factory is list else "{}"
    if field.default is None:
        return "-"
    if isinstance(field.default, str):
        return f'"{field.default}"'
    return str(field.default).lower() if isinstance(field.default, bool) else repr(field.default)
