"""Locks that say who lives: held by a process, let go by the kernel however that process ends.

flock on a file that is never unlinked. The `filelock` package is not used here: importing it
costs 70 ms, its defaults differ between versions on whether the file is truncated or unlinked,
and where flock is missing it falls back to a file's existence, which outlives a killed holder.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from retrain.records.clock import utc_now
from retrain.records.files import FILE_MODE, records_error
from retrain.records.processes import start_mark
from retrain.records.text import plain

_PROBE_WAIT_S = 1.0  # somebody's `is_held` lasts microseconds; a machine that swaps may stretch it
_PAUSE_S = 0.002
_MAX_HOLDER_BYTES = 4096


@dataclass(frozen=True)
class Holder:
    """Who wrote itself into a lock file. A pid proves nothing: compare `started` before a signal."""

    pid: int
    host: str
    since: str
    started: str = ""  # `start_mark` of that process; "" if not known

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class HeldLock:
    """A lock that this process holds until `release`, the end of its `with` block, or its death."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        _held.add(self)

    def release(self) -> None:
        """Let go; safe to call twice."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            _held.discard(self)
            fcntl.flock(fd, fcntl.LOCK_UN)  # closing alone leaves it to a child that was forked just now
            os.close(fd)

    def forget(self) -> None:
        """Drop the descriptor without unlocking: what a forked child does with its parent's lock."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    def __enter__(self) -> HeldLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


_held: set[HeldLock] = set()


def _drop_in_child() -> None:
    # A forked child shares the lock, and would keep it alive after the death of its parent.
    for lock in _held:
        lock.forget()
    _held.clear()


os.register_at_fork(after_in_child=_drop_in_child)


def hold(path: Path) -> HeldLock | None:
    """Take the lock for as long as this process lives, or give None if somebody holds it.

    Says so at once if it is held; only probes of `is_held`, which last microseconds, are waited for.

    Raises:
        RecordsError: the file cannot be opened, or its file system has no locks.
    """
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(path, flags, FILE_MODE)
    except OSError as error:
        raise records_error(path, "lock", error) from error
    try:
        if not _lock(fd):
            os.close(fd)
            return None
        _write_holder(fd)
    except OSError as error:
        os.close(fd)
        raise records_error(path, "lock", error) from error
    return HeldLock(path, fd)


def is_held(path: Path) -> bool:
    """Tell whether a live process holds the lock; False if there is no such file.

    Raises:
        RecordsError: the file cannot be opened, or its file system has no locks.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise records_error(path, "open the lock", error) from error
    try:
        return not _try(fd, fcntl.LOCK_SH)
    except OSError as error:
        raise records_error(path, "lock", error) from error
    finally:
        os.close(fd)


def holder(path: Path) -> Holder | None:
    """Say who took the lock last, for a message; None if that is not known."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = json.loads(os.read(fd, _MAX_HOLDER_BYTES))
        return Holder(
            pid=int(found["pid"]),
            host=plain(str(found["host"]), 64),
            since=plain(str(found["since"]), 32),
            started=str(found.get("started", "")),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    finally:
        os.close(fd)


def _lock(fd: int) -> bool:
    deadline = time.monotonic() + _PROBE_WAIT_S
    while not _try(fd, fcntl.LOCK_EX):
        # A shared lock beside it means that only probes hold it; refused, that a real holder does.
        if not _try(fd, fcntl.LOCK_SH) or time.monotonic() > deadline:
            return False
        fcntl.flock(fd, fcntl.LOCK_UN)
        time.sleep(_PAUSE_S * (1 + os.urandom(1)[0] / 255))  # two starters must not keep in step
    return True


def _try(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _write_holder(fd: int) -> None:
    mine = {"pid": os.getpid(), "host": os.uname().nodename, "since": utc_now()}
    text = json.dumps({**mine, "started": start_mark(os.getpid())})
    os.ftruncate(fd, 0)
    os.pwrite(fd, text.encode() + b"\n", 0)
