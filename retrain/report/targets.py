"""Where a report or table may be written: never through a link, over others' files only if told to."""

from __future__ import annotations

import os
import stat
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from retrain.errors import ConfigError
from retrain.records.files import records_error
from retrain.report.export import FIRST as COLUMNS  # that every table begins with

MARK = b"retrain report"
READ_BYTES = 65536  # at either end of a file
PNG_START = 33  # bytes of the signature and the first chunk, which come before any other


def prepare(paths: Sequence[Path], may_replace: Callable[[str], bool]) -> None:
    """Make the folders of files that are about to be written, and refuse those that must not be.

    Args:
        paths: the files.
        may_replace: asked, with a description, before a file that retrain did not write is replaced.

    Raises:
        ConfigError: a link or directory is in the way, or a file that must not be replaced.
        RecordsError: a folder cannot be made.
    """
    strangers = [path for path in paths if _is_strangers(path)]
    if strangers and not may_replace(", ".join(map(str, strangers))):
        raise ConfigError(
            f"{strangers[0]}: exists, and retrain did not write it; --force replaces it, or name another file"
        )
    for folder in {path.parent for path in paths}:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise records_error(folder, "make the folder", error) from error
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"{folder}: cannot be written by this user; name another folder")


def marked(content: bytes, form: str) -> bytes:
    """Return an image with a mark by which retrain knows it again."""
    if form == "svg":
        return content + b"<!-- " + MARK + b" -->\n"
    chunk = b"tEXtSoftware\0" + MARK
    framed = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return content[:PNG_START] + framed + content[PNG_START:]


def _is_strangers(path: Path) -> bool:
    """Whether a file is there that retrain did not write; a device or pipe is nobody's."""
    try:
        linked, mode = path.is_symlink(), path.stat().st_mode
    except FileNotFoundError:
        if path.is_symlink():
            raise ConfigError(f"{path}: is a link to nothing; remove it, or name another file") from None
        return False
    except OSError as error:
        raise records_error(path, "look at", error) from error
    if stat.S_ISDIR(mode):
        raise ConfigError(f"{path}: is a directory; name a file in it")
    if not stat.S_ISREG(mode):
        return False
    if linked:
        raise ConfigError(f"{path}: is a link, which would change another file; name that file itself")
    return path.stat().st_size > 0 and not _is_ours(path)


def _is_ours(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            start = file.read(READ_BYTES)
            file.seek(max(0, os.fstat(file.fileno()).st_size - READ_BYTES))
            end = file.read()
    except OSError:
        return False
    if start.startswith(b"PAR1"):  # names of columns are in the footer
        return all(name.encode() in end for name in COLUMNS)
    first_line = start.partition(b"\n")[0]
    is_table = first_line.startswith(",".join(COLUMNS).encode())
    is_json = first_line.startswith(b"{") and all(f'"{name}": '.encode() in first_line for name in COLUMNS)
    return is_table or is_json or MARK in start[:1000] or MARK in end[-100:]
