"""Who holds the permits, for people: the records that holders write, and reading them back.

Nothing is admitted or refused by what stands here. Times are taken from the monotonic clock,
which the processes of one boot share, so that setting the wall clock changes no `held_s`.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from retrain.locks.descriptors import LockFile
from retrain.locks.processes import boot_id
from retrain.semaphore.limits import read_limits
from retrain.semaphore.wakeup import wake, wakeup_address

MAX_TEXT = 100  # characters of a label or host name: one line of a table
_RECORD_BYTES = 4096  # two such texts with every character escaped still fit


@dataclass(frozen=True, slots=True)
class Holder:
    """One permit that is out. Text is what the holder wrote: bounded, but not to be trusted."""

    pid: int  # 0 while the holder has not said who it is
    host: str
    label: str
    held_s: float


@dataclass(frozen=True, slots=True)
class SemaphoreState:
    """A semaphore at one moment."""

    permits: int
    holders: tuple[Holder, ...]
    waiting: int


def slot_path(directory: Path, number: int) -> str:
    """Name the file of a slot."""
    return f"{directory}/slot-{number:04d}"


def seat_path(directory: Path, number: int) -> str:
    """Name the file of a waiter's seat."""
    return f"{directory}/seat-{number:04d}"


def describe_holder(label: str) -> str:
    """Describe this process, apart from the time; made before a wait, to be quick after it."""
    host = os.uname().nodename[:MAX_TEXT]
    record = {"pid": os.getpid(), "host": host, "label": label[:MAX_TEXT], "clock": boot_id()}
    return json.dumps(record).removesuffix("}")


def write_holder(slot: LockFile, description: str) -> None:
    """Say in the first line of a slot's file who holds it, from now on."""
    times = f'"monotonic_s": {time.monotonic()!r}, "wall_s": {time.time()!r}'
    os.pwrite(slot.fileno(), f"{description}, {times}}}\n".encode(), 0)


def inspect_semaphore(directory: Path) -> SemaphoreState:
    """Look at a semaphore without waiting for anything or writing anything.

    Works in a read-only directory and in a copy, where nothing is held.

    Raises:
        RecordsError: there is no semaphore in the directory, or its files cannot be read.
    """
    limits = read_limits(directory)
    slots = [slot_path(directory, number) for number in range(limits.slots)]
    holders = tuple(_holder_of(slot) for slot in slots if _is_locked(slot))
    waiting = sum(_is_locked(str(seat)) for seat in sorted(directory.glob("seat-*")))
    _wake_watcher(directory)
    return SemaphoreState(limits.permits, holders, waiting)


def _is_locked(path: str) -> bool:
    try:
        file = LockFile(path, read_only=True)
    except FileNotFoundError:
        return False
    with closing(file):
        return not file.try_lock(shared=True)


def _wake_watcher(directory: Path) -> None:
    """Make a watcher that found a free slot locked, because it was being looked at, look again."""
    wait_queue = directory / "turnstile.lock"
    if wait_queue.exists():
        wake(wakeup_address(wait_queue))


def _holder_of(slot: str) -> Holder:
    with closing(LockFile(slot, read_only=True)) as file:
        return read_holder(file)


def read_holder(slot: LockFile) -> Holder:
    """Read who holds a slot, or held it last: see `write_holder`."""
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
