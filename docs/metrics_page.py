"""Write docs/metrics.md from the declarations of rows: `python docs/metrics_page.py`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from retrain.records.row_parts import WRITERS, keys_of
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
    parts = (_part(name, kind) for name, kind in kinds_of_parts().items())
    of_a_run = _section("RunRow", RunRow, "Printed by `status --json`, `run --json` and `resume --json`.")
    return PREFACE + "".join(chain(*parts, of_a_run))


def kinds_of_parts() -> dict[str, Any]:
    """Return the class of each part of a step's row that has a field of its own, by that field."""
    hints = {name: (hint, *get_args(hint)) for name, hint in get_type_hints(StepRow).items()}
    return {
        name: next(filter(dataclasses.is_dataclass, kinds))
        for name, kinds in hints.items()
        if name != "others"
    }


def _part(name: str, kind: Any) -> Iterator[str]:
    writer, when = WRITERS[kind]
    return _section(name.replace("_", " ").capitalize(), kind, f"Written by `{writer}`, {when}.")


def _described(kind: Any) -> dict[str, tuple[str, str]]:
    """Return the unit and the meaning of each column, by its name."""
    metadata = {part.name: part.metadata for part in dataclasses.fields(kind) if part.metadata}
    described = {name: (how["unit"], how["meaning"]) for name, how in metadata.items()}
    if kind is RunRow:
        for of_step in kinds_of_parts().values():
            meanings = _described(of_step)
            for name, key, *_ in keys_of(of_step):
                if "is_of_last_step" in metadata.get(key, ()):
                    described[key] = meanings[name][0], f"in the last row: {meanings[name][1]}"
    return described


def _section(title: str, kind: Any, written: str) -> Iterator[str]:
    yield f"\n## {title}\n\n{inspect.getdoc(kind)} {written}\n\n"
    yield "| field | type | unit | meaning |\n|---|---|---|---|\n"
    hints = get_type_hints(kind)
    described = _described(kind)
    for name, key, _, may_be_infinite in keys_of(kind):
        unit, meaning = described[name]
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
