"""The file operations behind every record: small, checked, and replaceable as one.

All changes to a disk are these calls, looked up on `os` when they happen: `os.open`, `os.write`,
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
MAX_SMALL_FILE_BYTES = 128 * 2**20  # a manifest of 100,000 runs fits; a file that size is no record of ours


def make_directory(path: Path) -> None:
    """Make a private directory and its missing parents; one that exists already is left as it is.

    Raises:
        RecordsError: not possible, or `path` is a symbolic link or no directory.
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
    # whoever made it may have been killed before its name was synced; what is in it had to wait for that
    try:
        with os.scandir(path) as entries:
            if next(entries, None) is None:
                sync_directory(path.parent)
    except PermissionError:  # somebody else made it, somewhere that we may not read
        return
    except OSError as error:
        raise records_error(path, "sync the directory", error) from error


def make_new_directory(path: Path, *, exclusive: bool = False) -> None:
    """Make one private directory and make its name last.

    Raises:
        FileExistsError: it exists already, and `exclusive`.
        RecordsError: not possible.
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
    """Remove a file, if it is there.

    Raises:
        RecordsError: not possible.
    """
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise records_error(path, "remove", error) from error


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a power loss."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems do not sync directories
            raise
    finally:
        os.close(fd)


def write_all(fd: int, data: bytes) -> None:
    """Write every byte: a disk that fills up takes a part first and refuses only the rest."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def open_regular(path: Path) -> int:
    """Open a regular file for reading, never waiting (as a planted FIFO would make us).

    Raises:
        FileNotFoundError: there is none.
        RecordsError: it cannot be read, or is no regular file.
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
    """Open a file that a process's output is appended to; never through a symbolic link.

    Raises:
        RecordsError: it cannot be opened, or is no regular file.
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
    """Read a whole file, None if there is none.

    Raises:
        RecordsError: it cannot be read, is no regular file, or is far too large for a record.
    """
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return None
    try:
        size = os.fstat(fd).st_size
        if size > MAX_SMALL_FILE_BYTES:
            raise RecordsError(f"{path}: has {size} bytes, too many for this record; move it away")
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
