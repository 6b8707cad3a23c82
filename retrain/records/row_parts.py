"""Parts of a row: dataclasses whose fields declare their keys in the file, their units and their meanings."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import field
from functools import cache
from itertools import chain
from typing import Any, TypeAlias, get_args, get_type_hints

Value: TypeAlias = str | int | float | None
Columns: TypeAlias = Mapping[str, Value]  # of a row, or of a finished run's result

PREFACE = """\
# Metrics

Every field of `metrics.jsonl`, which has one row per step. `retrain schema --metrics` prints this page.
`null` means that a value is unknown or not finite. `read_metrics(run_dir)` returns the rows as mappings in
step order, each step once. Rows that other versions wrote may lack some fields.
"""


def measured(unit: str, meaning: str, *, key: str = "", is_optional: bool = False, **default: Any) -> Any:
    """Declare a field of a row.

    Args:
        unit: of its value; "" for names and texts.
        meaning: one line for docs/metrics.md.
        key: its name in the file, the part's prefix included; "" for the prefix and the attribute's name. A
            mapping has one key per item, `key_item`, and shows the item's name in capitals.
        is_optional: whether a value of None leaves the key out instead of writing null.
        default: as for `dataclasses.field`.
    """
    described = {"unit": unit, "meaning": meaning, "key": key, "is_optional": is_optional}
    return field(metadata=described, **default)


def columns(part: Any) -> dict[str, Value]:
    """Return one part's keys and values as metrics.jsonl has them; none if the part is None.

    A mapping of parts has their names for the capitals in their prefix.
    """
    row: dict[str, Value] = {}
    if isinstance(part, Mapping):
        for name, one in part.items():
            row |= {key.replace("NAME", name): value for key, value in columns(one).items()}
        return row
    kind: Any = type(part)  # hashable, which mypy cannot infer for a dataclass's type
    for name, key, is_optional in () if part is None else keys_of(kind):
        value = getattr(part, name)
        if isinstance(value, dict):
            stem = key.rpartition("_")[0]
            row |= {f"{stem}_{item}": found for item, found in value.items()}
        elif value is not None or not is_optional:
            row[key] = value
    return row


@cache
def keys_of(kind: Any) -> tuple[tuple[str, str, bool], ...]:
    """Return a part's attributes, their keys in the file, and whether None leaves the key out."""
    prefix = getattr(kind, "PREFIX", "")
    found = ((part.name, part.metadata) for part in dataclasses.fields(kind))
    return tuple((name, how["key"] or prefix + name, how["is_optional"]) for name, how in found)


def metrics_page(row: Any) -> str:
    """Return the documentation's page about metrics.jsonl: one heading per part, one table row per field."""
    hints = get_type_hints(row)
    return PREFACE + "".join(chain(*(_section(part, hints[part.name]) for part in dataclasses.fields(row))))


def _section(part: dataclasses.Field[Any], hint: Any) -> Iterator[str]:
    kind: Any = next(kind for kind in (hint, *get_args(hint)) if dataclasses.is_dataclass(kind))
    title = part.name.replace("_", " ").capitalize()
    written = f"Written by `{part.metadata['by']}`, {part.metadata['when']}."
    yield f"\n## {title}\n\n{inspect.getdoc(kind)} {written}\n\n| field | unit | meaning |\n|---|---|---|\n"
    for declared, (_, key, _) in zip(dataclasses.fields(kind), keys_of(kind), strict=True):
        yield f"| `{key}` | {declared.metadata['unit']} | {declared.metadata['meaning']} |\n"
