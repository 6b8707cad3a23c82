"""Write docs/metrics.md from the declarations of rows: `python docs/metrics_page.py`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from retrain.records.row_parts import keys_of
from retrain.records.run_row import RunRow
from retrain.records.step_row import StepRow

PREFACE = """\
# Metrics

Every field of `metrics.jsonl`, which has one row per step; and [of a run](#runrow) in the JSON of `status`.
`python docs/metrics_page.py` writes this page. `null` means that a value is unknown or not finite.
`read_metrics(run_dir)` returns the rows as mappings in step order, each step once. Rows that other versions
wrote may lack some fields.
"""


def metrics_page() -> str:
    """Return the page: a heading per part of a row, then one for a run's row."""
    hints = get_type_hints(StepRow)
    parts = (_part(part, hints[part.name]) for part in dataclasses.fields(StepRow) if part.metadata)
    of_a_run = _section("RunRow", RunRow, "Printed by `status --json`, `run --json` and `resume --json`.")
    return PREFACE + "".join(chain(*parts, of_a_run))


def _part(part: dataclasses.Field[Any], hint: Any) -> Iterator[str]:
    kind: Any = next(kind for kind in (hint, *get_args(hint)) if dataclasses.is_dataclass(kind))
    written = f"Written by `{part.metadata['by']}`, {part.metadata['when']}."
    return _section(part.name.replace("_", " ").capitalize(), kind, written)


def _section(title: str, kind: Any, written: str) -> Iterator[str]:
    yield f"\n## {title}\n\n{inspect.getdoc(kind)} {written}\n\n"
    yield "| field | type | unit | meaning |\n|---|---|---|---|\n"
    hints = get_type_hints(kind)
    described = {part.name: part.metadata for part in dataclasses.fields(kind)}
    for name, key, _, may_be_infinite in keys_of(kind):
        unit, meaning = described[name]["unit"], described[name]["meaning"]
        hint = hints[name] | None if may_be_infinite else hints[name]
        yield f"| `{key}` | {_type(hint)} | {unit} | {meaning} |\n"


def _type(hint: Any) -> str:
    """Return the type of a value in words: of a mapping, which has a key per item, that of an item."""
    kinds = get_args(hint) or (hint,)
    if get_origin(hint) is Mapping:
        return _type(kinds[1])
    if get_origin(hint) is Literal:
        return "str"
    return " or ".join("null" if kind is NoneType else kind.__name__ for kind in kinds)


if __name__ == "__main__":
    Path(__file__).with_name("metrics.md").write_text(metrics_page(), encoding="utf-8")
