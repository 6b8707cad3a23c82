"""Read files that other processes append lines to: only the new lines, or a log as it grows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from retrain.errors import records_error
from retrain.records.files import opened
from retrain.records.lines import read_end
from retrain.records.text import plain_lines

WHOLE_BYTES = 2**16  # a file up to this size is read as a whole
SAMPLES = 32  # lines read from the middle of a longer file
END_LINES = 6  # read at least from the end of a longer file: more than the rows that a median needs
_MOST_NEW_BYTES = 2**20  # more than this at once (a sleeping laptop) is sampled as well
_LINE_BYTES = 2**12  # most rows fit; a longer one is read again with more room
LONGEST_LINE_BYTES = 2**16  # a longer line is skipped when a file is sampled

Mark = tuple[int, int, int]  # inode, size and modification time: changes whenever the file does


def mark_of(path: str) -> Mark | None:
    """Return a mark that changes when the file is appended to or replaced; None if it does not exist."""
    try:
        found = os.stat(path)  # noqa: PTH116 (called a thousand times a second; a Path would double the cost)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise records_error(Path(path), "look at", error) from error
    return found.st_ino, found.st_size, found.st_mtime_ns


@dataclass(frozen=True, slots=True)
class Growth:
    """New complete lines, in file order."""

    lines: list[bytes]
    begins_anew: bool  # discard earlier lines: the file was replaced, or this is the first read


class GrowingFile:
    """A file of lines, each of which is returned once when complete.

    The first read of a long file returns its first line, a sample from the middle, and its last lines.
    """

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._mark: Mark | None = None
        self._at = 0  # every line before this offset was returned

    def look(self) -> Growth | None:
        """Return the new lines; None, after a single `stat`, if nothing changed."""
        mark = mark_of(self._path)
        if mark == self._mark:
            return None
        before, self._mark = self._mark, None  # if reading fails, the next call reads again
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
        with opened(Path(self._path)) as fd:
            if anew and size > WHOLE_BYTES:
                start, data = read_end(fd, END_LINES)
                lines = _sample(fd, start)
            else:
                start, data, lines = self._at, os.pread(fd, size - self._at, self._at), []
        end = data.rfind(b"\n") + 1
        self._at = start + end
        lines += [line for line in data[:end].split(b"\n") if line.strip()]
        return Growth(lines, begins_anew=anew)


def _sample(fd: int, end: int) -> list[bytes]:
    """Return the first line and evenly spaced others before the offset `end`."""
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
_LONGEST_LINE = 2000


def follow(path: Path, count: int, is_over: Callable[[], bool]) -> Iterator[str]:
    """Iterate over the last `count` lines of a log and those after them, safe to print.

    It ends once `is_over` returns True and the end is reached. A log that became shorter was replaced, and is
    read from its start; one that does not exist has no lines.
    """
    at, data = 0, b""
    with suppress(FileNotFoundError), opened(path) as fd:
        at, data = read_end(fd, count)
    at += len(data)
    *lines, rest = data.split(b"\n")
    yield from map(_printable, lines[-count:])
    while True:
        ends = is_over()  # called first, so that lines written before the end are still read below
        before = at
        added, at = _read_from(path, before)
        if at - len(added) != before:
            rest = b""  # a fragment of the previous log
        *lines, rest = (rest + added).split(b"\n")
        yield from map(_printable, lines)
        if ends:
            if rest:
                yield _printable(rest)
            return
        if not added:
            time.sleep(LOOK_S)


def _read_from(path: Path, at: int) -> tuple[bytes, int]:
    """Read a file from an offset; return what is there, and its end."""
    try:
        with opened(path) as fd:
            size = os.fstat(fd).st_size
            at = at if at <= size else 0  # 0: replaced, as by log rotation
            added = os.pread(fd, size - at, at)
            return added, at + len(added)
    except FileNotFoundError:
        return b"", at


def _printable(line: bytes) -> str:
    """Return a line with its blanks, which tables and tracebacks need, and nothing that a terminal obeys."""
    text = line[: 16 * _LONGEST_LINE].decode("utf-8", "replace")  # megabytes of escapes cost nothing
    whole = " ".join(plain_lines(text))
    return whole if len(whole) <= _LONGEST_LINE else f"{whole[: _LONGEST_LINE - 1]}…"
