"""The number of permits, and the slots: a locked slot is a permit in use; its first line names the holder.

Only the lock decides admission; the text is for display. Times are from the monotonic clock, which all
processes of one boot share, so that setting the wall clock does not change `held_s`. permits.json, which
holds the number, is replaced atomically.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from retrain.base.errors import DamagedRecordError, RecordsError
from retrain.base.locks import GUARD, Descriptor, LockFile, boot_id, locked, open_regular
from retrain.control.semaphore.wait_queue import wake, wakeup_address
from retrain.records.files import remove_leftovers, write_atomic

MAX_PERMITS = 512  # the watcher keeps one open file per permit, and 1024 is a usual limit
OPEN_EARLY = 8  # slots that a waiter opens before its turn; many threads of a process may wait
WAIT_QUEUE = "turnstile.lock"  # its name on disk: other versions may use the directory too
COUNTS_LOCK = "permits.lock"  # held while the number of permits is written
MAX_TEXT = 100  # characters of a label or host name: one line of a table
_RECORD_BYTES = 4096  # two such texts fit even with every character escaped; so does permits.json


@dataclass(frozen=True, slots=True)
class Holder:
    """The holder of a permit, as written by itself: untrusted text of bounded length."""

    pid: int  # 0 until the holder has written its record
    host: str
    label: str
    held_s: float


@dataclass(frozen=True, slots=True)
class SemaphoreState:
    """A semaphore at one moment."""

    permits: int
    holders: tuple[Holder, ...]
    waiting: int


@dataclass(frozen=True, slots=True)
class PermitCounts:
    """`permits` may be in use at once; after a decrease, slots up to `slots` may still be held."""

    permits: int
    slots: int


class PermitsFile:
    """The counts as read once; can check whether they were replaced since."""

    def __init__(self, directory: Path) -> None:
        """Read the counts; raise RecordsError if the directory holds no semaphore, or a damaged one."""
        self._path = f"{directory}/permits.json"
        try:
            with GUARD:
                self._file = Descriptor(open_regular(self._path, os.O_RDONLY))
        except FileNotFoundError as error:
            raise RecordsError(
                f"{self._path}: missing, so this is not a semaphore's directory; opening one there, as "
                "`retrain resume` does, writes it"
            ) from error
        text = os.read(self._file.fileno(), _RECORD_BYTES)
        try:
            fields = json.loads(text)
            self.now = PermitCounts(check_permits(fields["permits"]), check_permits(fields["slots"]))
        except (ValueError, TypeError, KeyError, RecursionError):
            self.close()
            raise DamagedRecordError(
                f"{self._path}: damaged; opening the semaphore again, as `retrain resume` does, repairs it"
            ) from None

    def is_current(self) -> bool:
        """Whether the file was not replaced: the inode of an open file is not reused."""
        return os.stat(self._path).st_ino == os.stat(self._file.fileno()).st_ino  # noqa: PTH116

    def close(self) -> None:
        self._file.close()


def read_permits(directory: Path) -> PermitCounts:
    """Read the counts once, as `PermitsFile` does."""
    file = PermitsFile(directory)
    file.close()
    return file.now


def create_permits(directory: Path, permits: int) -> None:
    """Set the number of permits, unless the directory has a readable one."""
    with locked(directory / COUNTS_LOCK):
        remove_leftovers(directory, "permits.json")
        with suppress(DamagedRecordError):
            if os.path.lexists(directory / "permits.json"):
                read_permits(directory)
                return
        numbers = [path.name.removeprefix("slot-") for path in directory.glob("slot-*")]  # each may be held
        slots = max((int(n) + 1 for n in numbers if n.isascii() and n.isdigit()), default=0)
        _write(directory, PermitCounts(permits, max(permits, min(slots, MAX_PERMITS))))


def change_permits(directory: Path, permits: int) -> None:
    """Set the number of permits; the number of slots never falls, because old slots may still be held."""
    with locked(directory / COUNTS_LOCK):
        _write(directory, PermitCounts(permits, max(permits, read_permits(directory).slots)))


def _write(directory: Path, counts: PermitCounts) -> None:
    write_atomic(directory / "permits.json", json.dumps(asdict(counts)))


def check_permits(permits: object) -> int:
    """Return `permits`; raise ValueError unless it is a whole number from 1 to `MAX_PERMITS`."""
    if type(permits) is not int or not 1 <= permits <= MAX_PERMITS:
        raise ValueError(f"permits: got {permits!r}; needs a whole number from 1 to {MAX_PERMITS}")
    return permits


def describe_holder(label: str) -> str:
    """Return this process's record without the times; made before the wait to save time after it."""
    host = os.uname().nodename[:MAX_TEXT]
    record = {"pid": os.getpid(), "host": host, "label": label[:MAX_TEXT], "clock": boot_id()}
    return json.dumps(record).removesuffix("}")


def write_holder(slot: LockFile, description: str) -> None:
    """Write the holder of a slot into the first line of its file, with the time."""
    times = f'"monotonic_s": {time.monotonic()!r}, "wall_s": {time.time()!r}'
    os.pwrite(slot.fileno(), f"{description}, {times}}}\n".encode(), 0)


def inspect_semaphore(directory: Path | str) -> SemaphoreState:
    """Return who holds permits and how many wait, without waiting or writing.

    Works in a read-only directory and in a copy, where nothing is held.

    Raises:
        RecordsError: the directory holds no semaphore, or its files cannot be read.
    """
    directory = Path(directory)
    counts = read_permits(directory)
    slots = (_slot_path(directory, number) for number in range(counts.slots))
    holders = tuple(filter(None, map(_holder_of, slots)))
    waiting = sum(_holder_of(str(seat)) is not None for seat in sorted(directory.glob("seat-*")))
    wait_queue = directory / WAIT_QUEUE
    if wait_queue.exists():  # its watcher may have seen a free slot as locked because it was inspected
        wake(wakeup_address(wait_queue))
    return SemaphoreState(counts.permits, holders, waiting)


def take_seat(directory: Path) -> LockFile:
    """Lock a random free seat: many waiters need few tries, and few waiters need few files."""
    seats = 8.0
    while True:
        number = int.from_bytes(os.urandom(4), "big") % int(seats)
        seat = LockFile(f"{directory}/seat-{number:04d}")
        if seat.try_lock():
            return seat
        seat.close()
        seats *= 1.25


def _slot_path(directory: Path, number: int) -> str:
    return f"{directory}/slot-{number:04d}"


def _holder_of(path: str) -> Holder | None:
    """Return who holds a slot or a seat; None if it is free."""
    try:
        file = LockFile(path, read_only=True)
    except FileNotFoundError:
        return None
    with closing(file):
        return None if file.try_lock(shared=True) else read_holder(file)


def read_holder(slot: LockFile) -> Holder:
    """Read the current or last holder of a slot; see `write_holder`."""
    text = os.pread(slot.fileno(), _RECORD_BYTES, 0)
    try:
        fields = json.loads(text.partition(b"\n")[0])
        since_s, now_s = float(fields["monotonic_s"]), time.monotonic()
        if fields["clock"] != boot_id():
            since_s, now_s = float(fields["wall_s"]), time.time()
        host, label = str(fields["host"])[:MAX_TEXT], str(fields["label"])[:MAX_TEXT]
        return Holder(int(fields["pid"]), host, label, max(0.0, now_s - since_s))
    except (ValueError, OverflowError, TypeError, KeyError, RecursionError):
        return Holder(0, "", "", 0.0)


class Slots:
    """The slot files, kept open between tries; only for the first in the wait queue."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[int, LockFile] = {}
        self._counts = PermitsFile(directory)

    def prepare(self) -> None:
        """Open the first files while another process is still the first in the queue."""
        for number in range(min(self._counts.now.slots, OPEN_EARLY)):
            self._file(number)

    def take(self) -> LockFile | None:
        """Lock a free slot; None if all permits are in use."""
        while True:
            counts = self._counts.now
            if counts.slots == counts.permits:
                number = next((n for n in range(counts.slots) if self._file(n).try_lock()), None)
            else:  # after a decrease, also slots beyond the permits may be held
                free = [n for n in range(counts.slots) if self._file(n).try_lock()]
                is_room = counts.slots - len(free) < counts.permits
                number = free[0] if is_room and free else None
                for unused in free[1:] if is_room else free:
                    self._files[unused].unlock()
            # Checked after locking: a process that changes the number from now on finds the slot taken.
            if self._counts.is_current():
                return None if number is None else self._files.pop(number)
            if number is not None:
                self._files[number].unlock()
            self._counts.close()
            self._counts = PermitsFile(self._directory)

    def holders(self, at_most: int) -> set[int]:
        """Return the process ids of at most `at_most` current or last holders."""
        return {read_holder(file).pid for file in islice(self._files.values(), at_most)}

    def close(self) -> None:
        """Close all files except the taken slot."""
        self._counts.close()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _file(self, number: int) -> LockFile:
        if number not in self._files:
            self._files[number] = LockFile(_slot_path(self._directory, number))
        return self._files[number]
