"""The configuration reference, generated from the schema's classes."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from retrain.config.campaign import Campaign, Condition
from retrain.config.keys import LARGEST_COUNT, Normalization, keys_of
from retrain.config.resolve import SECTIONS, sections_of

BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
PREFACE = """\
# Configuration

Every table and key of a campaign's TOML file, with its default. `retrain schema --markdown` prints this
page, `retrain schema --keys` the same as a table, and `retrain schema` the JSON Schema for editors. A key
that is not here is an error, and nothing is coerced: `3.9` is not an int and `"false"` is not a bool.

The last column says what a key affects. `result`: it is part of a run's identity, so changing it makes
another experiment, which `retrain resume` refuses. `time`, `schedule` and `display` (speed, when and where
runs execute, and what is recorded) can change between a run's attempts.
"""


@dataclass(frozen=True)
class KeyReference:
    """One key: its type, default and meaning."""

    name: str
    type: str
    default: str
    description: str
    bounds: str
    affects: str  # result, time, schedule or display
    help: str  # the description, with what the key affects if that is not the result


@dataclass(frozen=True)
class SectionReference:
    """One table and its keys."""

    name: str
    description: str
    keys: tuple[KeyReference, ...]


def sections() -> list[SectionReference]:
    """Describe every table of a campaign file, in the order of the schema."""
    classes = [(name, kind) for name, kind in SECTIONS.items() if name != "run"]
    inner = [(f"campaign.{name}", kind) for name, kind in sections_of(Campaign).items()]
    return [_section(name, kind) for name, kind in [*classes, *inner, ("[campaign.conditions]", Condition)]]


def markdown() -> str:
    """Write the reference as a page: one heading per table, one row per key."""
    return PREFACE + "".join(line for section in sections() for line in _page(section))


def _page(section: SectionReference) -> Iterator[str]:
    yield f"\n## `[{section.name}]`\n\n{section.description}\n\n"
    yield "| key | type | default | meaning | affects |\n|---|---|---|---|---|\n"
    for key in section.keys:
        kind = _cell(key.type + (f", {key.bounds}" if key.bounds else ""))
        yield f"| `{key.name}` | {kind} | `{key.default}` | {_cell(key.description)} | {key.affects} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _section(name: str, kind: Any) -> SectionReference:
    keys = []
    for key in keys_of(kind).values():
        default, bounds = key.stands_for or _default(key.default), _bounds(key.bounds)
        said = _type(key.annotation), default, key.description, bounds, key.affects, key.help
        keys.append(KeyReference(key.name, *said))
    return SectionReference(name, inspect.getdoc(kind) or "", tuple(keys))


def _type(annotation: str) -> str:
    plain = annotation.removesuffix(" | None").replace("list[Any]", "list[int]")
    plain = re.sub(r"Literal\[(.*?)\]", lambda found: found[1].replace("'", '"').replace(", ", " or "), plain)
    normalizations = " or ".join(f'"{name}"' for name in get_args(Normalization))
    aliases = {"Table": "table", "str": "string", "Permits": 'int or "auto"', "Normalization": normalizations}
    return aliases.get(plain, plain)


def _bounds(constraints: Mapping[str, Any]) -> str:
    return " and ".join(
        f"{words} {constraints[name]:,}"
        for name, words in BOUNDS.items()
        if abs(constraints.get(name, math.inf)) < LARGEST_COUNT  # larger ones only keep arithmetic sane
    )


def _default(value: Any) -> str:
    if dataclasses.is_dataclass(value):
        return "{}"
    if value is None:
        return "-"
    if isinstance(value, str):
        return f'"{value}"'
    return str(value).lower() if isinstance(value, bool) else repr(value)
