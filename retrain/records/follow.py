"""Reads a log as it grows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from retrain.records.files import open_regular
from retrain.records.lines import read_tail
from retrain.records.text import plain

LOOK_S = 0.2
_BLOCK = 2**16
_LONGEST_LINE = 2000


def last_lines(path: Path, count: int) -> list[str]:
    """Give the last lines of a log, safe to print; empty without a file.

    Raises:
        RecordsError: it cannot be read.
    """
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return []
    try:
        return [_printable(line) for line in read_tail(fd, count)]
    finally:
        os.close(fd)


def follow(path: Path, is_over: Callable[[], bool]) -> Iterator[str]:
    """Give what is added to a log from now on, line by line, until `is_over` and all has been given.

    Raises:
        RecordsError: it cannot be read.
    """
    at, rest = _size(path), b""
    while True:
        ends = is_over()  # asked first: what was written before the end is still read below
        added, at = _read_from(path, at)
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
