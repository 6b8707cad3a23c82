"""Replace small files atomically: a reader sees the old content or the new content, never a mixture.

The content is written to a temporary file in the same directory, synced and renamed; then the directory
is synced. A crash leaves at most a `.NAME.*.tmp` file, which `remove_leftovers` removes.
"""

# ruff: noqa: PTH105, PTH108 (calls on `os`, because that is where a crash test replaces them)

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrain.errors import DamagedRecordError, RecordsError, records_error
from retrain.records.files import FILE_MODE, read_small, remove_file, sync_directory, write_all


def write_atomic(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Replace the content of `path`; the file gets mode 0600.

    Args:
        path: the file; its directory must exist.
        content: text is written as UTF-8.
        durable: survive a power loss. If False, the write skips the disk sync (for files rewritten every
            step); readers still never see a half-written file while the machine is up.

    Raises:
        RecordsError: the write failed, or `path` is a symbolic link. The old content is unchanged.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        _refuse_special(path)
        _write_new(temporary, data, durable=durable)
        os.replace(temporary, path)
        if durable:
            sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise records_error(path, "write", error) from error


def write_json(path: Path, content: Mapping[str, Any], *, durable: bool = True) -> None:
    """Replace the content of `path` with a JSON object; see `write_atomic`.

    Raises:
        RecordsError: the write failed.
        ValueError: `content` holds NaN or infinity, which JSON cannot represent.
    """
    write_atomic(path, json.dumps(content, indent=1, allow_nan=False) + "\n", durable=durable)


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; return None if the file does not exist.

    Raises:
        RecordsError: the file cannot be read.
        DamagedRecordError: the file does not hold a JSON object.
    """
    data = read_small(path)
    if data is None:
        return None
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedRecordError(
            f"{path}: is not valid JSON ({error}); restore it or move it away"
        ) from error
    if not isinstance(found, dict):
        raise DamagedRecordError(f"{path}: does not hold a JSON object; restore it or move it away")
    return found


def remove_leftovers(directory: Path) -> int:
    """Remove temporary files of killed writers; only for the holder of the directory's lock.

    Returns:
        The number of files removed.

    Raises:
        RecordsError: a file cannot be removed.
    """
    leftovers = [p for p in directory.glob(".*.tmp") if not p.is_dir()]
    for leftover in leftovers:
        remove_file(leftover)
    return len(leftovers)


def _refuse_special(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        kind = "a symbolic link" if stat.S_ISLNK(mode) else "not a regular file"
        raise RecordsError(f"{path}: is {kind}, so it was not replaced; move it away")


def _write_new(path: Path, data: bytes, *, durable: bool) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, FILE_MODE)
    try:
        write_all(fd, data)
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)
