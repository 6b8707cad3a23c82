"""The page about metrics.jsonl in the documentation, made from the fields of a step's row."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

from retrain.records.row_parts import keys_of
from retrain.records.step_row import StepRow

PREFACE = """\
# Metrics

Every field of `metrics.jsonl`, which has one row per step. `retrain schema --metrics` prints this page.
`null` means that a value is unknown or not finite. `read_metrics(run_dir)` returns the rows as mappings in
step order, each step once. Rows that other versions wrote may lack some fields.
"""


def markdown() -> str:
    """Return the page of metrics: one heading per part, one table row per field."""
    return PREFACE + "".join(line for part in dataclasses.fields(StepRow) for line in _section(part))


def _section(part: dataclasses.Field[Any]) -> Iterator[str]:
    hint = get_type_hints(StepRow)[part.name]
    kind: Any = next(kind for kind in (hint, *get_args(hint)) if dataclasses.is_dataclass(kind))
    title = part.name.replace("_", " ").capitalize()
    written = f"Written by `{part.metadata['by']}`, {part.metadata['when']}."
    yield f"\n## {title}\n\n{inspect.getdoc(kind)} {written}\n\n| field | unit | meaning |\n|---|---|---|\n"
    for declared, (_, key, _) in zip(dataclasses.fields(kind), keys_of(kind), strict=True):
        yield f"| `{key}` | {declared.metadata['unit']} | {declared.metadata['meaning']} |\n"
