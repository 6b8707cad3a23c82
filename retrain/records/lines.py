"""Append-only files with one JSON object per line, readable after any interruption.

A line is one `os.write` to a descriptor in append mode. An interruption (a full disk, a kill, a power
loss) leaves at most one incomplete last line. Readers skip it; the next writer repairs it: a complete
object without its newline is kept, and anything else is truncated, because it never was a record.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from retrain import locks
from retrain.errors import RecordsError, records_error
from retrain.records.files import opened, record_of, sync_directory, write_all

_BLOCK = 2**16
_MAX_TAIL_BYTES = 16 * 2**20  # our lines are never that long

Row = dict[str, Any]
T = TypeVar("T")


class LineAppender:
    """The only writer of a file of lines; opening it repairs an incomplete last line.

    Complete lines are never damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        try:
            self._fd = locks.open_regular(str(path), os.O_RDWR | os.O_APPEND | os.O_CREAT)
            if os.fstat(self._fd).st_size == 0:  # new, or its creator may have been killed before this sync
                sync_directory(path.parent)
            _repair_tail(self._fd)
        except OSError as error:
            self.close()
            raise records_error(path, "append to", error) from error

    def write(self, line: str) -> None:
        found = os.fstat(self._fd)
        if not found.st_nlink:  # a free check; `sync` also detects a move and an NFS server's rename
            raise self._removed()
        try:
            write_all(self._fd, line.encode() + b"\n")
        except BaseException as error:  # also a signal handler that raises must not leave half a line
            try:
                os.ftruncate(self._fd, found.st_size)
            except OSError as failure:
                raise records_error(self._path, "remove a half-written line from", failure) from failure
            if isinstance(error, OSError):
                raise records_error(self._path, "append to", error) from error
            raise

    def sync(self) -> None:
        """Make every line so far survive a power loss, and check that the file still has its name."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise records_error(self._path, "sync", error) from error
        if not locks.is_in_place(self._path, self._fd):
            raise self._removed()

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _removed(self) -> RecordsError:
        return RecordsError(f"{self._path}: was removed or replaced while it was being written")


def append_line(path: Path, row: Mapping[str, object], *, durable: bool = True) -> None:
    """Append one row; make it survive a power loss if it is durable."""
    with LineAppender(path) as lines:
        lines.write(dump_line(row))
        if durable:
            lines.sync()


def dump_line(row: Mapping[str, object]) -> str:
    """Write a row as one line of JSON.

    Raises:
        ValueError: a value is NaN or infinite; the message names its key.
        TypeError: JSON cannot represent a value; the message names its key.
    """
    try:
        return json.dumps(row, allow_nan=False, default=_plain_number)
    except (ValueError, TypeError):
        for key, value in row.items():
            try:
                json.dumps(value, allow_nan=False, default=_plain_number)
            except (ValueError, TypeError) as error:
                problem = f"{key} is {value!r}; a record holds finite numbers and JSON values only"
                raise type(error)(problem) from error
        raise


def parse_line(line: bytes) -> Row | None:
    """Parse one line; None if it is incomplete or not a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def number_in(row: Mapping[str, object] | None, key: str) -> float | None:
    """Return the finite number stored under a key; None if there is none."""
    value = row.get(key) if row else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None


def read_lines(path: Path) -> Iterator[bytes]:
    """Iterate over the non-blank lines of a file; none if the file does not exist."""
    with suppress(FileNotFoundError), opened(path) as fd, os.fdopen(fd, "rb", _BLOCK, closefd=False) as file:
        yield from filter(bytes.strip, file)


def read_records(path: Path, kind: type[T]) -> tuple[T, ...]:
    """Return the record that each line holds; lines in which a value is missing or wrong are skipped."""
    found = []
    for line in read_lines(path):
        with suppress(ValueError):
            found.append(record_of(kind, parse_line(line) or {}))
    return tuple(found)


def read_tail(fd: int, count: int) -> list[bytes]:
    """Return the last `count` lines of an open file, reading little more than them."""
    return [*filter(bytes.strip, read_end(fd, count)[1].split(b"\n"))][-count:]


def read_end(fd: int, count: int) -> tuple[int, bytes]:
    """Return where the end of an open file begins, and that end: `count` lines or more, if there are."""
    start = os.fstat(fd).st_size
    block, data = _BLOCK // 2, b""
    while start > 0 and data.count(b"\n") <= count and len(data) < _MAX_TAIL_BYTES:
        length = min(block, start)
        start -= length
        data = os.pread(fd, length, start) + data
        block *= 2
    fragment = data.find(b"\n") + 1 if start else 0
    return start + fragment, data[fragment:]


def _repair_tail(fd: int) -> None:
    start = size = os.fstat(fd).st_size
    while start > 0:  # find the end of the last complete line
        block = max(0, start - _BLOCK)
        newline = os.pread(fd, start - block, block).rfind(b"\n")
        start = block + newline + 1
        if newline >= 0:
            break
    if start == size:
        return
    if size - start < _MAX_TAIL_BYTES and parse_line(os.pread(fd, size - start, start)) is not None:
        write_all(fd, b"\n")
    else:
        os.ftruncate(fd, start)


def _plain_number(value: object) -> object:
    item = getattr(value, "item", None)  # numpy's scalars
    if item is None:
        raise TypeError(f"{type(value).__name__} is not a JSON value")
    return item()
