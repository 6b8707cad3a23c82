"""Prints dataclass rows as tables for people or as JSON for programs: the same rows."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TextIO, cast

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from retrain.cli import MOST_CONDITIONS
from retrain.records.text import count_of, number, plain, short_labels, without_middle

STYLES = {"done": "green", "running": "cyan", "pending": "dim", "waiting": "dim", "interrupted": "yellow"}
BAD = "bold red"
JSON_VERSION = 1  # raised when a field of docs/json.md goes or changes its meaning; others may be added
PIPE_WIDTH = 200
LONGEST_CELL = 500  # characters
LEAST_COLUMNS = 3  # of a fitted table
LEAST_NAME = 8  # characters in its first column
GOOD_NAME = 24  # a longer name is cut before a column is left out
LEAST_WRAPPED = 70  # columns of a terminal
GAP = 3  # characters between two columns


def print_json(value: Any) -> None:
    """Print dataclasses as JSON; what is not finite becomes a string, since JSON has no infinity."""
    print(json.dumps(plain_value(value), indent=2))


def print_result(value: Any, rows: str = "", **others: Any) -> None:
    """Print a dataclass, or under the key `rows` a sequence of them, as one JSON object with its version."""
    result = plain_value(value)
    print_json({"version": JSON_VERSION} | ({rows: result} if rows else result) | others)


class _Console(Console):
    """Takes text as it is: no markup, no emoji, no guessed colours.

    A pipe gets long lines, so that a program that reads them finds them whole.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        super().__init__(file=file, markup=False, emoji=False, highlight=False)
        if not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = PIPE_WIDTH

    def on_broken_pipe(self) -> None:
        """Raise, so that the caller decides about a closed pipe; rich would end the process."""
        raise BrokenPipeError


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """Keep the exit code of a result that cannot be printed: a closed pipe, or a full disk."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # `retrain run FILE.toml | head` is no trouble
            messages().print(f"the result could not be shown ({error.strerror})", soft_wrap=True)
        with open(os.devnull, "wb") as nowhere:  # noqa: PTH123 - or Python complains when it exits
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


class _Unfailing:
    """A stream that drops what cannot be written: its reader may be gone, its disk full."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()


def messages() -> Console:
    """Return a console for progress messages, whose loss must not end the work."""
    return _Console(cast(TextIO, _Unfailing(sys.stderr)))


def console() -> Console:
    """Return a console for results."""
    return _Console()


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, wrap: bool = True
) -> Table:
    """Lay out cells; columns whose header starts with '>' are aligned right. Text is made safe to print."""
    grid = Table(
        title=Text(plain(title, LONGEST_CELL)) if title else None,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        title_style="bold",
        pad_edge=False,
    )
    for column in columns:
        side: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        overflow: Literal["fold", "ellipsis"] = "fold" if wrap else "ellipsis"
        grid.add_column(column.lstrip(">"), justify=side, no_wrap=not wrap, overflow=overflow)
    for row in rows:
        grid.add_row(*(cell if isinstance(cell, Text) else Text(plain(cell, LONGEST_CELL)) for cell in row))
    return grid


def print_wrapped(title: str, columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> None:
    """Print rows of sentences as a table; on a narrow terminal, where it would break words, cell by cell."""
    out = console()
    if out.width >= LEAST_WRAPPED:
        out.print(table(title, columns, rows))
        return
    if title:
        out.print(Text(plain(title, LONGEST_CELL), "bold"))
    for row in rows:
        first, *others = (c if isinstance(c, Text) else Text(plain(c, LONGEST_CELL)) for c in row)
        out.print(first, *(Padding(cell, (0, 0, 0, 2)) for cell in others if cell), sep="\n")


def fitted(title: str, columns: Sequence[str], rows: Sequence[Sequence[str | Text]], width: int) -> Table:
    """Lay out as many columns as fit, unwrapped; the first ones matter most; names in the first are cut."""
    count = len(columns)
    named = [(without_middle(str(name), GOOD_NAME), *others) for name, *others in rows]
    while count > LEAST_COLUMNS and width_of(columns[:count], named) > width:
        count -= 1
    room = max(LEAST_NAME, width - GAP - width_of(columns[1:count], [row[1:] for row in rows]))
    names = short_labels([str(name) for name, *_ in rows], room)
    cut = (without_middle(name, room) for name in names)
    shown = [(name, *others[: count - 1]) for name, (_, *others) in zip(cut, rows, strict=True)]
    return table(title, columns[:count], shown, wrap=False)


def width_of(columns: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> int:
    """Return the characters that a table needs to show everything on one line a row."""
    titles = [name.lstrip(">") for name in columns]
    cells = zip(titles, *rows, strict=False)  # rows may have more
    return sum(max(cell_len(str(cell)) for cell in column) + GAP for column in cells)


def left_out(rows: int, name: str = "condition") -> Iterator[str]:
    """Iterate over at most one line: how many of so many rows are not shown."""
    if (more := rows - MOST_CONDITIONS) > 0:
        yield f"  ... and {count_of(more, f'more {name}')}; --json lists all"


def state(name: str) -> Text:
    """Return a run's state in its colour."""
    return Text(name, style=STYLES.get(name, BAD))


def plain_value(value: Any) -> Any:
    """Return a value as JSON types: dataclasses as objects, numbers that are not finite as strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain_value(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): plain_value(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def spread(mean: float | None, std: float | None) -> str:
    """Return mean ± spread; without a spread, the mean alone."""
    return number(mean) if std is None else f"{number(mean)} ± {number(std)}"
