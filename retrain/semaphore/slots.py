"""Takes a slot, if taking one keeps the number of permits. Only for who is inside the turnstile."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from retrain.locks.descriptors import LockFile
from retrain.semaphore.limits import Limits, LimitsFile
from retrain.semaphore.state import read_holder, slot_path

OPEN_EARLY = 8  # files for each waiter; many threads of a process may wait


class Slots:
    """The slot files, kept open from one look to the next."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[int, LockFile] = {}
        self._limits = LimitsFile(directory)

    def prepare(self) -> None:
        """Open what the first look needs, while others still hold the turnstile."""
        for number in range(min(self._limits.now.slots, OPEN_EARLY)):
            self._file(number)

    def take(self) -> LockFile | None:
        """Lock a free slot, or give None if all permits are out."""
        while True:
            number = self._lock_one(self._limits.now)
            # Asked after locking: whoever changes the number from now on finds the slot taken.
            if self._limits.is_current():
                return None if number is None else self._files.pop(number)
            if number is not None:
                self._files[number].unlock()
            self._limits.close()
            self._limits = LimitsFile(self._directory)

    def holders(self, at_most: int) -> set[int]:
        """Return which processes hold permits, or did last: so many of the slots that were looked at."""
        return {read_holder(file).pid for file in islice(self._files.values(), at_most)}

    def close(self) -> None:
        """Close all but the slot that was taken."""
        self._limits.close()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _lock_one(self, limits: Limits) -> int | None:
        if limits.slots == limits.permits:
            return next((n for n in range(limits.slots) if self._file(n).try_lock()), None)
        free = [n for n in range(limits.slots) if self._file(n).try_lock()]
        is_room = limits.slots - len(free) < limits.permits
        for number in free[1:] if is_room else free:
            self._files[number].unlock()
        return free[0] if is_room and free else None

    def _file(self, number: int) -> LockFile:
        if number not in self._files:
            self._files[number] = LockFile(slot_path(self._directory, number))
        return self._files[number]
