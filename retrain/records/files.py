"""The file operations behind every record, and small files that are replaced atomically.

All changes to a disk are these calls, looked up on `os` at the time of the call: `os.open`, `os.write`,
`os.ftruncate`, `os.fsync`, `os.replace`, `os.unlink`, `os.mkdir`, `os.close`. Crash tests replace them.

A small file is written to a temporary file beside it, synced and renamed; then the directory is synced: a
reader sees the old or the new content, never a mixture. A crash leaves at most a `.NAME.*.tmp` file, which
`remove_leftovers` removes.
"""

# ruff: noqa: PTH102, PTH105, PTH108 (calls on `os`, because that is where a crash test replaces them)

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from functools import cache, partial
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from retrain.base import locks
from retrain.base.errors import DamagedRecordError, RecordsError, records_error

T = TypeVar("T")
Source = TypeVar("Source")

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
MAX_SMALL_FILE_BYTES = 128 * 2**20  # a manifest of 100,000 runs fits; a larger file is not one of our records


def make_directory(path: Path) -> None:
    """Make a private directory and its missing parents; an existing directory is not changed."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        if not path.parent.is_dir():
            make_directory(path.parent)
        make_new_directory(path)
        return
    except (OSError, ValueError) as error:
        raise records_error(path, "make the directory", error) from error
    if not stat.S_ISDIR(mode):
        raise RecordsError(f"{path}: is not a directory; move it away")
    # its creator may have been killed before syncing the name, which happens before anything is put in it
    try:
        with os.scandir(path) as entries:
            if next(entries, None) is None:
                sync_directory(path.parent)
    except PermissionError:  # made by another user; we may not read it
        return
    except OSError as error:
        raise records_error(path, "sync the directory", error) from error


def make_new_directory(path: Path, *, exclusive: bool = False) -> None:
    """Make one private directory, durably; raise FileExistsError if it exists and `exclusive` is set."""
    try:
        os.mkdir(path, DIRECTORY_MODE)
        sync_directory(path.parent)
    except FileExistsError:
        if exclusive:
            raise
    except OSError as error:
        raise records_error(path, "make the directory", error) from error


def remove_file(path: Path) -> None:
    """Remove a file if it exists."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise records_error(path, "remove", error) from error


def sync_directory(path: Path) -> None:
    """Sync a directory, so that the names in it survive a power loss."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems do not sync directories
            raise
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """Write every byte: `os.write` may write only a part, for example on a disk that fills up."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open a regular file to read, without waiting as a FIFO would; raise FileNotFoundError without one.

    Any other OSError, also one in the `with` block, becomes a RecordsError.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(path) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise records_error(path, "read", error) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise RecordsError(f"{path}: is not a regular file; move it away")
        yield fd
    except OSError as error:
        raise records_error(path, "read", error) from error
    finally:
        os.close(fd)


def open_log(path: Path) -> int:
    """Open a file to append a process's output to; symbolic links are not followed."""
    try:
        return locks.open_regular(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        raise records_error(path, "append to", error) from error


def read_small(path: Path) -> bytes | None:
    """Read a whole file; None if it does not exist. A file too large for a record is refused."""
    try:
        with opened(path) as fd:
            size = os.fstat(fd).st_size
            if size > MAX_SMALL_FILE_BYTES:
                raise RecordsError(f"{path}: has {size} bytes, too large for this record; move it away")
            data = os.read(fd, size + 1)  # so that a file that does not grow takes one call
            while len(data) != size and (more := os.read(fd, 2**16)):
                data += more
            return data
    except FileNotFoundError:
        return None


def readable(
    read: Callable[[Source], T], source: Source, tell: Callable[[str], object] = lambda problem: None
) -> T | None:
    """Return what `read` finds; None, and the problem is told, if records cannot be read."""
    try:
        return read(source)
    except RecordsError as error:
        tell(str(error))
        return None


def write_atomic(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Replace the content of `path`; the file gets mode 0600.

    Args:
        path: the file; its directory must exist.
        content: text is written as UTF-8.
        durable: survive a power loss. If False, the write skips the disk sync (for files rewritten every
            step); readers still never see a half-written file while the machine is up.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with contextlib.suppress(FileNotFoundError):
            mode = path.lstat().st_mode
            if not stat.S_ISREG(mode):
                kind = "a symbolic link" if stat.S_ISLNK(mode) else "not a regular file"
                raise RecordsError(f"{path}: is {kind}, so it was not replaced; move it away")
        fd = os.open(temporary, flags, FILE_MODE)
        try:
            write_all(fd, data)
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
        if durable:
            sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise records_error(path, "write", error) from error


def write_json(path: Path, content: Mapping[str, object], *, durable: bool = True) -> None:
    """Replace the content of `path` with a JSON object; a ValueError if it holds NaN or infinity."""
    write_atomic(path, json.dumps(content, indent=1, allow_nan=False) + "\n", durable=durable)


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None if the file does not exist, DamagedRecordError if it holds anything else."""
    data = read_small(path)
    if data is None:
        return None
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        what = f"is not valid JSON ({error}); restore it or move it away"
        raise DamagedRecordError(f"{path}: {what}") from error
    if not isinstance(record, dict):
        raise DamagedRecordError(f"{path}: does not hold a JSON object; restore it or move it away")
    return record


def record_of(kind: type[T], values: Mapping[str, Any]) -> T:
    """Build a dataclass, and the records in it, from a JSON object, whose further keys are ignored.

    Raises ValueError if a value is missing, or not of its field's type.
    """
    hashable: Any = kind  # which mypy cannot infer for a dataclass's type
    present = [(name, of) for name, of, is_needed in _fields(hashable) if is_needed or name in values]
    try:
        return kind(**{name: of(values[name]) for name, of in present})
    except (LookupError, TypeError, OverflowError) as error:
        raise ValueError(f"not a {kind.__name__}: {error!r}") from error


def set_aside(path: Path) -> Path:
    """Move a damaged record away, if it exists, over an earlier one; return its new path."""
    aside = path.with_name(f"{path.name}.damaged")
    if path.is_symlink() and not path.is_dir():  # not made by us, so it is not moved
        raise RecordsError(f"{path}: is a symbolic link; move it away")
    try:
        if path.is_dir():
            shutil.rmtree(aside, ignore_errors=True)  # a directory replaces only an empty one
        with contextlib.suppress(FileNotFoundError):
            path.replace(aside)
    except OSError as error:
        raise records_error(path, "move away", error) from error
    return aside


def remove_leftovers(directory: Path, name: str = "*") -> None:
    """Remove temporary files of killed writers of `name`; only for the holder of the lock that they need."""
    for leftover in directory.glob(f".{name}.*.tmp"):
        if not leftover.is_dir():
            remove_file(leftover)


@cache
def _fields(kind: Any) -> tuple[tuple[str, Callable[[Any], Any], bool], ...]:
    """Return the name of each field, what converts a value of JSON to it, and whether there must be one."""
    kinds = get_type_hints(kind)
    return tuple(
        (field.name, _converter(kinds[field.name]), field.default is field.default_factory is MISSING)
        for field in fields(kind)
    )


def _converter(kind: Any) -> Callable[[Any], Any]:
    origin, parts = get_origin(kind), get_args(kind)
    if NoneType in parts and len(parts) == 2:
        of = _converter(parts[0])
        return lambda value: None if value is None else of(value)
    if origin is tuple and Ellipsis in parts:
        item = _converter(parts[0])
        return lambda value: tuple(map(item, _checked(value, list | tuple)))
    if origin is tuple:
        places = list(map(_converter, parts))
        return lambda value: tuple(of(one) for of, one in zip(places, value, strict=True))
    if origin in (dict, Mapping):
        each = _converter(parts[1])
        return lambda value: {key: each(one) for key, one in _checked(value, dict).items()}
    if hasattr(kind, "__dataclass_fields__"):
        return lambda value: record_of(kind, _checked(value, dict))
    checks = {float: _finite} | {one: partial(_checked, kind=one) for one in (bool, int, str)}
    return checks.get(kind, lambda value: value)


def _finite(value: Any) -> float:
    if not math.isfinite(number := float(_checked(value, int | float))):
        raise ValueError(f"got {value!r}")
    return number


def _checked(value: Any, kind: Any) -> Any:
    """Return a value of JSON; a TypeError if it is of another kind: to JSON, true is no number."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"got {value!r}")
    return value
