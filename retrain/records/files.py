"""The file operations behind every record, in one place so that tests can replace them.

All changes to a disk are these calls, looked up on `os` at the time of the call: `os.open`, `os.write`,
`os.ftruncate`, `os.fsync`, `os.replace`, `os.unlink`, `os.mkdir`, `os.close`. A crash test
replaces them there.
"""

# ruff: noqa: PTH102, PTH108 (calls on `os`, because that is where a crash test replaces them)

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from retrain.errors import RecordsError, records_error

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
MAX_SMALL_FILE_BYTES = 128 * 2**20  # a manifest of 100,000 runs fits; a larger file is not one of our records


def make_directory(path: Path) -> None:
    """Make a private directory and its missing parents; an existing directory is not changed.

    Raises:
        RecordsError: it cannot be made, or `path` is a symbolic link or not a directory.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        if not path.parent.is_dir():
            make_directory(path.parent)
        make_new_directory(path)
        return
    except (OSError, ValueError) as error:
        raise records_error(path, "make the directory", _as_os_error(error)) from error
    if not stat.S_ISDIR(mode):
        raise RecordsError(f"{path}: is not a directory; move it away")
    _keep_name_of_empty(path)


def _keep_name_of_empty(path: Path) -> None:
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
    """Make one private directory, durably.

    Raises:
        FileExistsError: it exists already and `exclusive` is set.
        RecordsError: it cannot be made.
    """
    try:
        os.mkdir(path, DIRECTORY_MODE)
        sync_directory(path.parent)
    except FileExistsError:
        if exclusive:
            raise
    except OSError as error:
        raise records_error(path, "make the directory", error) from error


def remove_file(path: Path) -> None:
    """Remove a file if it exists.

    Raises:
        RecordsError: it cannot be removed.
    """
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


def open_regular(path: Path) -> int:
    """Open a regular file for reading without blocking (opening a FIFO could block).

    Raises:
        FileNotFoundError: the file does not exist.
        RecordsError: it cannot be read, or is not a regular file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(path) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise records_error(path, "read", _as_os_error(error)) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise RecordsError(f"{path}: is not a regular file; move it away")
    return fd


def open_log(path: Path) -> int:
    """Open a file to append a process's output to; symbolic links are not followed.

    Raises:
        RecordsError: it cannot be opened, or is not a regular file.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, FILE_MODE)
    except OSError as error:
        raise records_error(path, "append to", error) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise RecordsError(f"{path}: is not a regular file; move it away")
    return fd


def read_small(path: Path) -> bytes | None:
    """Read a whole file; return None if it does not exist.

    Raises:
        RecordsError: it cannot be read, is not a regular file, or is too large for a record.
    """
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return None
    try:
        size = os.fstat(fd).st_size
        if size > MAX_SMALL_FILE_BYTES:
            raise RecordsError(f"{path}: has {size} bytes, which is too large for this record; move it away")
        return _read_to_end(fd, size)
    except OSError as error:
        raise records_error(path, "read", error) from error
    finally:
        os.close(fd)


def _read_to_end(fd: int, size: int) -> bytes:
    data = os.read(fd, size + 1)
    if len(data) == size:
        return data
    parts = [data]
    while data := os.read(fd, 2**16):
        parts.append(data)
    return b"".join(parts)


def _as_os_error(error: OSError | ValueError) -> OSError:
    return error if isinstance(error, OSError) else OSError(errno.EINVAL, str(error))
