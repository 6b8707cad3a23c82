"""Reads a log as it grows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from retrain.records.files import open_regular
from retrain.records.text import plain

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
