"""Prints dataclass rows as tables for people or as JSON for programs: the same rows."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

STYLES = {
    "done": "green",
    "running": "cyan",
    "pending": "dim",
    "interrupted": "yellow",
}
BAD = "bold red"


def print_json(value: Any) -> None:
    """Print dataclasses as JSON; what is not finite becomes a string, since JSON has no infinity."""
    print(json.dumps(_plain(value), indent=2))


def console(*, stderr: bool = False) -> Console:
    """Give a console that takes text as it is: no markup, no emoji, no guessed colours."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """Lay out cells; columns whose header starts with '>' are aligned right."""
    made = Table(
        title=title or None, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False
    )
    for column in columns:
        made.add_column(
            column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold"
        )
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return made


def state(name: str) -> Text:
    """Colour a run's state."""
    return Text(name, style=STYLES.get(name, BAD))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
