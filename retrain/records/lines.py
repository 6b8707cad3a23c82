"""Append-only files with one JSON object per line, readable after any interruption.

A line is one `os.write` to a descriptor in append mode. An interruption (a full disk, a kill, a power
loss) leaves at most one incomplete last line. Readers skip it; the next writer repairs it: a complete
object without its newline is kept, and anything else is truncated, because it never was a record.

A `GrowingFile` reads what other processes append.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeGuard, TypeVar

from retrain.base import locks
from retrain.base.errors import RecordsError, records_error
from retrain.records.files import opened, record_of, sync_directory, write_all

_BLOCK = 2**16
_FIRST_BLOCK = 2**14  # of an end: more than the rows that a median needs, and each of them is parsed
_MAX_TAIL_BYTES = 16 * 2**20  # our lines are never that long
WHOLE_BYTES = 2**16  # a file up to this size is read as a whole
SAMPLES = 32  # lines read from the middle of a longer file
END_LINES = 6  # read at least from the end of a longer file
_MOST_NEW_BYTES = 2**20  # more than this at once (a sleeping laptop) is sampled as well
_LINE_BYTES = 2**12  # most rows fit; a longer one is read again with more room
LONGEST_LINE_BYTES = 2**16  # a longer line is skipped when a file is sampled
LARGEST = 1e100  # no measurement is larger, and sums of squares must not overflow

Row = dict[str, Any]
Mark = tuple[int, int, int]  # inode, size and modification time: changes whenever the file does
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
            size = os.fstat(self._fd).st_size
            if size == 0:  # new, or its creator may have been killed before this sync
                sync_directory(path.parent)
            start, data = read_end(self._fd, 0, most=size)
            whole = data.rfind(b"\n") + 1
            if whole < len(data) and parse_line(data[whole:]) is not None:
                write_all(self._fd, b"\n")
            elif whole < len(data):
                os.ftruncate(self._fd, start + whole)
        except OSError as error:
            self.close()
            raise records_error(path, "append to", error) from error

    def write(self, line: str) -> None:
        status = os.fstat(self._fd)
        if not status.st_nlink:  # a free check; `sync` also detects a move and an NFS server's rename
            raise self._removed()
        try:
            write_all(self._fd, line.encode() + b"\n")
        except BaseException as error:  # also a signal handler that raises must not leave half a line
            try:
                os.ftruncate(self._fd, status.st_size)
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


def is_count(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number of 0 or more, and no larger than a float holds exactly."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 2**53


def number_in(row: Mapping[str, object] | None, key: str) -> float | None:
    """Return the finite number stored under a key; None if there is none."""
    return finite(row.get(key)) if row else None


def finite(value: object) -> float | None:
    """Return a finite number of a record; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None


def measured(value: object) -> float:
    """Return a number as a float; NaN if it cannot be a measurement."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST <= value <= LARGEST:
        return math.nan
    return float(value)


def read_lines(path: Path) -> Iterator[bytes]:
    """Iterate over the non-blank lines of a file; none if the file does not exist."""
    with suppress(FileNotFoundError), opened(path) as fd, os.fdopen(fd, "rb", _BLOCK, closefd=False) as file:
        yield from filter(bytes.strip, file)


def read_records(path: Path, kind: type[T]) -> tuple[T, ...]:
    """Return the record that each line holds; lines in which a value is missing or wrong are skipped."""
    records = []
    for line in read_lines(path):
        with suppress(ValueError):
            records.append(record_of(kind, parse_line(line) or {}))
    return tuple(records)


def read_tail(fd: int, count: int) -> list[bytes]:
    """Return the last `count` lines of an open file, reading little more than them."""
    return [*filter(bytes.strip, read_end(fd, count)[1].split(b"\n"))][-count:]


def read_end(fd: int, count: int, most: int = _MAX_TAIL_BYTES) -> tuple[int, bytes]:
    """Return where the end of an open file begins, and that end: `count` lines or more, if there are.

    It ends the search where it has read `most` bytes, or a little more.
    """
    start = os.fstat(fd).st_size
    block, data = _FIRST_BLOCK, b""
    while start > 0 and data.count(b"\n") <= count and len(data) < most:
        length = min(block, start)
        start -= length
        data = os.pread(fd, length, start) + data
        block *= 2
    fragment = data.find(b"\n") + 1 if start else 0
    return start + fragment, data[fragment:]


def mark_of(path: str) -> Mark | None:
    """Return a mark that changes when the file is appended to or replaced; None if it does not exist."""
    try:
        status = os.stat(path)  # noqa: PTH116 (called a thousand times a second; a Path would double the cost)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise records_error(Path(path), "look at", error) from error
    return status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(frozen=True, slots=True)
class Growth:
    """New complete lines, in file order."""

    lines: list[bytes]
    begins_anew: bool  # discard earlier lines: the file was replaced, or this is the first read


class GrowingFile:
    """A file of lines, each of which is returned once when complete."""

    def __init__(self, path: Path, *, is_sampled: bool = True) -> None:
        """Read nothing yet.

        The first read of a long file that `is_sampled` returns its first line, a sample from the middle, and
        its last lines.
        """
        self._path, self._name, self._is_sampled = path, str(path), is_sampled
        self._mark: Mark | None = None
        self.at_byte = 0  # every line before this offset was returned

    def read_growth(self) -> Growth | None:
        """Return the new lines; None, after a single `stat`, if nothing changed."""
        mark = mark_of(self._name)
        if mark == self._mark:
            return None
        before, self._mark = self._mark, None  # if reading fails, the next call reads again
        growth = self._read(before, mark)
        self._mark = mark
        return growth

    def _read(self, before: Mark | None, mark: Mark | None) -> Growth:
        if mark is None:
            self.at_byte = 0
            return Growth([], begins_anew=True)
        inode, size, _ = mark
        most = _MOST_NEW_BYTES if self._is_sampled else math.inf
        anew = before is None or before[0] != inode or not 0 <= size - self.at_byte <= most
        self.at_byte = 0 if anew else self.at_byte
        with opened(self._path) as fd:
            if anew and self._is_sampled and size > WHOLE_BYTES:
                start, data = read_end(fd, END_LINES)
                lines = _sample(fd, start)
            else:
                start, data, lines = self.at_byte, os.pread(fd, size - self.at_byte, self.at_byte), []
        end = data.rfind(b"\n") + 1
        self.at_byte = start + end
        lines += [line for line in data[:end].split(b"\n") if line.strip()]
        return Growth(lines, begins_anew=anew)


def _sample(fd: int, end: int) -> list[bytes]:
    """Return the first line and evenly spaced others before the offset `end`."""
    lines: dict[bytes, None] = {}
    for place in (end * number // SAMPLES for number in range(SAMPLES)):
        length = _LINE_BYTES
        while length <= LONGEST_LINE_BYTES:
            parts = os.pread(fd, min(length, end - place), place).split(b"\n", 2)
            parts = parts if place == 0 else parts[1:]
            if len(parts) > 1:
                lines[parts[0]] = None
                break
            length *= 4
    return [line for line in lines if line]


def _plain_number(value: object) -> object:
    item = getattr(value, "item", None)  # numpy's scalars
    if item is None:
        raise TypeError(f"{type(value).__name__} is not a JSON value")
    return item()
