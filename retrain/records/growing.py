"""Reads files of lines that others append to: only what is new since the last look, or as it comes (logs)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from retrain.errors import records_error
from retrain.records.files import open_regular
from retrain.records.text import plain

WHOLE_BYTES = 2**16  # a file up to this size is read as a whole
SAMPLES = 32  # lines looked at in the middle of a longer one
END_BYTES = 2**14  # read from the end of a longer one: more than the rows that a median is taken of
END_LINES = 6
_MOST_NEW_BYTES = 2**20  # more than this at once (a sleeping laptop) is sampled as well
_LINE_BYTES = 2**12  # most rows fit; a longer one is read again with more room
LONGEST_LINE_BYTES = 2**16  # a longer one is skipped where a file is sampled

Mark = tuple[int, int, int]  # what changes whenever a file does: inode, size, time of change


def mark_of(path: str) -> Mark | None:
    """Return what changes whenever a file is appended to or replaced; None if there is none.

    Raises:
        RecordsError: its directory cannot be looked into.
    """
    try:
        found = os.stat(path)  # noqa: PTH116 (asked a thousand times a second: a Path would double its cost)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise records_error(Path(path), "look at", error) from error
    return found.st_ino, found.st_size, found.st_mtime_ns


@dataclass(frozen=True, slots=True)
class Growth:
    """Whole lines that are new, in the order of the file."""

    lines: list[bytes]
    begins_anew: bool  # forget what earlier lines said: this is another file, or the first look at it


class GrowingFile:
    """A file of lines; every complete line is given once.

    A long file, when first looked at, gives its first line, some from between and its last ones.
    """

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._mark: Mark | None = None
        self._at = 0  # every line before this was given

    def look(self) -> Growth | None:
        """Return what is new; None, after a single `stat`, if nothing changed.

        Raises:
            RecordsError: it cannot be read.
        """
        mark = mark_of(self._path)
        if mark == self._mark:
            return None
        before, self._mark = self._mark, None  # looked at again, should reading fail
        growth = self._read(before, mark)
        self._mark = mark
        return growth

    def _read(self, before: Mark | None, mark: Mark | None) -> Growth:
        if mark is None:
            self._at = 0
            return Growth([], begins_anew=True)
        inode, size, _ = mark
        anew = before is None or before[0] != inode or not 0 <= size - self._at <= _MOST_NEW_BYTES
        self._at = 0 if anew else self._at
        fd = open_regular(Path(self._path))
        try:
            is_sampled = anew and size > WHOLE_BYTES
            start = _start_of_end(fd, size) if is_sampled else self._at
            lines = _sample(fd, start) if is_sampled else []
            data = os.pread(fd, size - start, start)
        except OSError as error:
            raise records_error(Path(self._path), "read", error) from error
        finally:
            os.close(fd)
        end = data.rfind(b"\n") + 1
        self._at = start + end
        lines += [line for line in data[:end].split(b"\n") if line.strip()]
        return Growth(lines, begins_anew=anew)


def _start_of_end(fd: int, size: int) -> int:
    """Return where the last lines begin: some of them, but at least one, if it is no monster."""
    length = END_BYTES  # the file is longer
    while os.pread(fd, length, size - length).count(b"\n") < END_LINES and length < LONGEST_LINE_BYTES:
        length = min(2 * length, size)
    return size - length + os.pread(fd, length, size - length).find(b"\n") + 1


def _sample(fd: int, end: int) -> list[bytes]:
    """Return the first line and others, evenly spaced, of what lies before `end`."""
    places = [end * number // SAMPLES for number in range(SAMPLES)]
    lines = [_line_after(fd, place, end) for place in places]
    return [line for line in dict.fromkeys(lines) if line]


def _line_after(fd: int, place: int, end: int) -> bytes:
    length = _LINE_BYTES
    while length <= LONGEST_LINE_BYTES:
        parts = os.pread(fd, min(length, end - place), place).split(b"\n", 2)
        parts = parts if place == 0 else parts[1:]
        if len(parts) > 1:
            return parts[0]
        length *= 4
    return b""


LOOK_S = 0.2
_BLOCK = 2**16
_MAX_TAIL_BYTES = 2**20
_LONGEST_LINE = 2000


def last_lines(path: Path, count: int) -> tuple[list[str], int]:
    """Return the last whole lines of a log, safe to print, and where the rest begins; nothing without a file.

    Raises:
        RecordsError: it cannot be read.
    """
    start = max(0, _size(path) - _MAX_TAIL_BYTES)
    data, _ = _read_from(path, start)
    whole = data.rfind(b"\n") + 1
    return [_printable(line) for line in data[:whole].splitlines()[-count:]], start + whole


def follow(path: Path, at: int, is_over: Callable[[], bool]) -> Iterator[str]:
    """Return a log from a place on, line by line, until `is_over` and all has been given.

    A log that is shorter than what was read of it is another one, and is given from its beginning.

    Raises:
        RecordsError: it cannot be read.
    """
    rest = b""
    while True:
        ends = is_over()  # asked first: what was written before the end is still read below
        before = at
        added, at = _read_from(path, before)
        if at - len(added) != before:
            rest = b""  # of the log that was here before
        *lines, rest = (rest + added).split(b"\n")
        yield from map(_printable, lines)
        if ends:
            if rest:
                yield _printable(rest)
            return
        if not added:
            time.sleep(LOOK_S)


def _read_from(path: Path, at: int) -> tuple[bytes, int]:
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return b"", at
    try:
        if os.fstat(fd).st_size < at:  # cut back or replaced, as those who rotate logs do
            at = 0
        parts = []
        while part := os.pread(fd, _BLOCK, at):
            parts.append(part)
            at += len(part)
        return b"".join(parts), at
    finally:
        os.close(fd)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _printable(line: bytes) -> str:
    return plain(line.decode("utf-8", "replace"), _LONGEST_LINE)
