"""Prints dataclass rows as tables for people or as JSON for programs: the same rows."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from retrain.records.text import plain

STYLES = {
    "done": "green",
    "running": "cyan",
    "pending": "dim",
    "interrupted": "yellow",
}
BAD = "bold red"
PIPE_WIDTH = 200
LONGEST_CELL = 500  # characters
LEAST_COLUMNS = 3  # of a fitted table
GAP = 3  # characters between two columns


def print_json(value: Any) -> None:
    """Print dataclasses as JSON; what is not finite becomes a string, since JSON has no infinity."""
    print(json.dumps(_plain(value), indent=2))


def console(*, stderr: bool = False) -> Console:
    """Give a console that takes text as it is: no markup, no emoji, no guessed colours.

    What is not a terminal has no width, so that lines are whole for the program that reads them.
    """
    made = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = PIPE_WIDTH
    return made


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, wrap: bool = True
) -> Table:
    """Lay out cells; columns whose header starts with '>' are aligned right. Text is made safe to print."""
    made = Table(
        title=Text(plain(title, LONGEST_CELL)) if title else None,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        title_style="bold",
        pad_edge=False,
    )
    for column in columns:
        side: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        overflow: Literal["fold", "ellipsis"] = "fold" if wrap else "ellipsis"
        made.add_column(column.lstrip(">"), justify=side, no_wrap=not wrap, overflow=overflow)
    for row in rows:
        made.add_row(*(cell if isinstance(cell, Text) else Text(plain(cell, LONGEST_CELL)) for cell in row))
    return made


def fitted(title: str, columns: Sequence[str], rows: Sequence[Sequence[str | Text]], width: int) -> Table:
    """Lay out as many of the columns as there is room for, unwrapped; the first ones matter most."""
    count = len(columns)
    while count > LEAST_COLUMNS and _width(columns[:count], rows) > width:
        count -= 1
    return table(title, columns[:count], [row[:count] for row in rows], wrap=False)


def _width(columns: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> int:
    longest = [
        max([len(name.lstrip(">")), *(len(row[number]) for row in rows)])
        for number, name in enumerate(columns)
    ]
    return sum(longest) + GAP * len(columns)


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
