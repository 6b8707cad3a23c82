"""Reads files that users write, one JSON object a line; every problem names its line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from retrain.errors import ConfigError

MAX_PROBLEMS = 20  # shown per source; the rest are probably the same mistake
T = TypeVar("T")
R = TypeVar("R")


def read_rows(
    rows: Iterable[tuple[int, R]],
    read: Callable[[int, R], Iterable[T]],
    source: str,
    *,
    unit: str = ":",
    needs: str,
) -> list[T]:
    """Return what all numbered rows hold; a ConfigError lists the wrong ones, or says what is needed of none.

    `read` raises a ValueError for a wrong row; errors name its place by `source`, `unit` and number.
    """
    found: list[T] = []
    problems: list[str] = []
    for number, row in rows:
        try:
            found += read(number, row)
        except ValueError as error:
            problems.append(f"{source}{unit}{number}: {error}")
    if len(problems) > MAX_PROBLEMS:
        problems[MAX_PROBLEMS:] = [f"{source}: {len(problems) - MAX_PROBLEMS} more lines are wrong"]
    if not found and not problems:
        problems.append(f"{source}: no rows; needs {needs}")
    if problems:
        raise ConfigError(problems)
    return found


def object_of(line: str, needs: str) -> dict[str, Any]:
    """Return the JSON object of a line; a ValueError says what is needed."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error}); needs one object per line") from error
    if not isinstance(row, dict):
        raise ValueError(f"got a {type(row).__name__}; needs {needs}")
    return row


def numbered_lines(path: Path, option: str) -> Iterator[tuple[int, str]]:
    """Yield each line that is not blank, with its number from 1; `option` names the file in a ConfigError."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{option}: cannot read {str(path)!r}: {error.strerror}; {how_to_correct(path)}"
        ) from error
    for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{path}:{number}: not UTF-8 ({error.reason}); save the file as UTF-8"
            ) from error
        if text.strip():
            yield number, text


def how_to_correct(path: str | Path) -> str:
    """Return what to do about the path of a file that is not there."""
    if Path(path).is_absolute():
        return "correct the path"
    return "the path is relative to the current directory"
