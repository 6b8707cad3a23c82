"""permits.json: the number of permits. It is replaced atomically, so a reader never sees a partial file."""

from __future__ import annotations

import json
import os
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from retrain.errors import DamagedRecordError, RecordsError, records_error
from retrain.locks.descriptors import GUARD, Descriptor, LockFile, open_regular
from retrain.records.files import write_all

MAX_PERMITS = 512  # the watcher keeps one open file per permit, and 1024 is a usual limit
_READ_BYTES = 4096  # the file is far smaller; a huge file must not fill the memory


@dataclass(frozen=True, slots=True)
class Limits:
    """`permits` may be in use at once; after a decrease, slots up to `slots` may still be held."""

    permits: int
    slots: int


class LimitsFile:
    """The limits as read once; can check whether they were replaced since."""

    def __init__(self, directory: Path) -> None:
        """Read the limits; writes nothing.

        Raises:
            RecordsError: the directory holds no semaphore, or its file is damaged.
        """
        self._path = f"{directory}/permits.json"
        try:
            with GUARD:
                self._file = Descriptor(open_regular(self._path, os.O_RDONLY))
        except FileNotFoundError:
            raise RecordsError(f"{self._path}: missing; {directory} is not a semaphore's directory") from None
        text = os.read(self._file.fileno(), _READ_BYTES)
        try:
            fields = json.loads(text)
            self.now = Limits(check_permits(fields["permits"]), check_permits(fields["slots"]))
        except (ValueError, TypeError, KeyError, RecursionError):
            self.close()
            raise DamagedRecordError(
                f"{self._path}: damaged; opening the semaphore again, as `retrain resume` does, repairs it"
            ) from None

    def is_current(self) -> bool:
        """Whether the file was not replaced: the inode of an open file is not reused."""
        return os.stat(self._path).st_ino == os.stat(self._file.fileno()).st_ino  # noqa: PTH116

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_limits(directory: Path) -> Limits:
    """Read the limits once, as `LimitsFile` does."""
    file = LimitsFile(directory)
    file.close()
    return file.now


def create_limits(directory: Path, permits: int) -> None:
    """Set the number of permits, unless the directory has a readable one.

    Raises:
        RecordsError: it cannot be written.
    """
    with closing(LockFile(f"{directory}/permits.lock")) as guard:
        guard.lock()
        try:
            if os.path.lexists(directory / "permits.json"):
                read_limits(directory)
                return
        except DamagedRecordError:
            pass
        _replace(directory, Limits(permits, max(permits, _slots_there(directory))))


def _slots_there(directory: Path) -> int:
    """Return the number of slots from the existing slot files: each may be held."""
    numbers = [path.name.removeprefix("slot-") for path in directory.glob("slot-*")]
    return min(max((int(n) + 1 for n in numbers if n.isascii() and n.isdigit()), default=0), MAX_PERMITS)


def change_limits(directory: Path, permits: int) -> None:
    """Set the number of permits; the number of slots never falls, because old slots may still be held.

    Raises:
        RecordsError: it cannot be written; the old number is kept.
    """
    with closing(LockFile(f"{directory}/permits.lock")) as guard:
        guard.lock()
        _replace(directory, Limits(permits, max(permits, read_limits(directory).slots)))


def check_permits(permits: object) -> int:
    """Return `permits` if it is a valid number of permits.

    Raises:
        ValueError: it is not a whole number from 1 to `MAX_PERMITS`.
    """
    if type(permits) is not int or not 1 <= permits <= MAX_PERMITS:
        raise ValueError(f"permits: got {permits!r}; needs a whole number from 1 to {MAX_PERMITS}")
    return permits


def _replace(directory: Path, limits: Limits) -> None:
    path = directory / "permits.json"
    temporary = f"{path}.new"
    try:
        fd = open_regular(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(fd, json.dumps(asdict(limits)).encode())
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)  # noqa: PTH105
    except OSError as error:
        raise records_error(path, "write", error) from error
