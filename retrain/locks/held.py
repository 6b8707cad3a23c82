"""Locks that say who lives: held by a process, let go by the kernel however that process ends.

A network file system may keep each machine's locks to itself, without a word. So a holder that others
may meet from another machine (`renew`) writes the time into its lock file every few seconds: a lease,
believed by machines other than its own only: of another host name, or another boot. Where the clocks of
two machines may differ, whoever wants the lock watches whether the time goes on, instead of comparing it.

flock on a file that is never unlinked, and not `filelock`, which is the plain lock elsewhere: these name
their holder, renew a lease, and are not kept alive by a forked child.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from retrain.records.clock import utc_now
from retrain.records.files import FILE_MODE, is_in_place, records_error
from retrain.records.processes import is_of_this_boot, start_mark
from retrain.records.text import plain

_PROBE_WAIT_S = 1.0  # somebody's `is_held` lasts microseconds; a machine that swaps may stretch it
_PAUSE_S = 0.002
_MAX_HOLDER_BYTES = 4096
RENEW_S = 10.0  # a write of 200 bytes this often costs a file server nothing, even times a thousand
LEASE_S = 60.0  # after this without a renewal nobody shows the holder as alive
WATCH_S = 25.0  # two renewals and a half: who wants the lock waits for one, in vain if the holder is dead
WATCH_PAUSE_S = 0.5
STALE_S = 600.0  # no two clocks of a cluster differ by so much (munge allows half of it): no need to watch


@dataclass(frozen=True)
class Holder:
    """Who wrote itself into a lock file. A pid proves nothing: compare `started` before a signal."""

    pid: int
    host: str
    since: str
    started: str = ""  # `start_mark` of that process; "" if not known
    renewed_at: float = 0.0  # by the wall clock of `host`; 0 if it renews no lease

    @property
    def is_here(self) -> bool:
        """Whether it took the lock from this kernel, which then knows whether it still lives."""
        return self.host == plain(os.uname().nodename, 64) and is_of_this_boot(self.started)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"

    def is_same_process(self, other: Holder) -> bool:
        """Whether two looks at a lock found the same holder, who may have renewed its lease between."""
        return (self.pid, self.host, self.started) == (other.pid, other.host, other.started)


class HeldLock:
    """A lock that this process holds until `release`, the end of its `with` block, or its death."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        self._since = utc_now()
        self._left = threading.Event()
        self._renewal: threading.Thread | None = None
        _held.add(self)

    @property
    def is_in_place(self) -> bool:
        """Whether the file is still where others look for it: its directory may have been removed."""
        return is_in_place(self.path, self._fd)

    def renew(self) -> None:
        """Have other machines see that this process lives, even if they do not see its lock."""
        _write_holder(self._fd, self._since, time.time())
        self._renewal = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._renewal.start()

    def _renew(self) -> None:
        while not self._left.wait(RENEW_S):
            with contextlib.suppress(OSError):  # a full disk: the lease runs out, the lock stays
                _write_holder(self._fd, self._since, time.time())

    def release(self) -> None:
        """Let go; safe to call twice."""
        if self._fd >= 0:
            if self._renewal is not None:
                self._left.set()
                self._renewal.join()
                with contextlib.suppress(OSError):
                    _write_holder(self._fd, self._since)
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

    Says so at once if it is held; only probes of `is_held`, which last microseconds, are waited for,
    and another machine's lease, which is watched for `WATCH_S` seconds.

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
        if _is_renewed_elsewhere(path):
            os.close(fd)
            return None
        _write_holder(fd)
    except OSError as error:
        os.close(fd)
        raise records_error(path, "lock", error) from error
    return HeldLock(path, fd)


def is_held(path: Path) -> bool:
    """Whether a live process holds the lock; False if there is no such file.

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
        if not _try(fd, fcntl.LOCK_SH):
            return True
    except OSError as error:
        raise records_error(path, "lock", error) from error
    finally:
        os.close(fd)
    leased = _lease_elsewhere(path)
    return leased is not None and -STALE_S < time.time() - leased.renewed_at < LEASE_S


def holder(path: Path) -> Holder | None:
    """Return who took the lock last, for a message; None if that is not known."""
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
            renewed_at=float(found.get("renewed_at", 0.0)),
        )
    except (OSError, ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    finally:
        os.close(fd)


def present_holder(path: Path) -> Holder | None:
    """Return who holds a lock that was just found held; None if that stays unknown, or nobody does any more.

    A holder writes itself into the file a moment after it has the lock; what stands there until then
    is its predecessor.
    """
    deadline = time.monotonic() + _PROBE_WAIT_S
    while True:
        found = holder(path)
        if found is not None and _may_live(found):
            return found
        if time.monotonic() > deadline or not is_held(path):
            return None
        time.sleep(_PAUSE_S)


def _may_live(found: Holder) -> bool:
    return not found.is_here or not found.started or start_mark(found.pid) == found.started


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


def _lease_elsewhere(path: Path) -> Holder | None:
    """Return the holder of a lease that another machine renewed last."""
    found = holder(path)
    return found if found is not None and found.renewed_at > 0 and not found.is_here else None


def _is_renewed_elsewhere(path: Path) -> bool:
    """Watch a lease of another machine; False as soon as nobody can be renewing it."""
    first = _lease_elsewhere(path)
    if first is None or time.time() - first.renewed_at > STALE_S:
        return False
    until = time.monotonic() + WATCH_S
    while time.monotonic() < until:
        time.sleep(WATCH_PAUSE_S)
        now = holder(path)  # opened anew, which makes a network file system look
        if now is not None and now != first:
            return now.renewed_at > 0
    return False


def _write_holder(fd: int, since: str = "", renewed_at: float = 0.0) -> None:
    mine: dict[str, object] = {"pid": os.getpid(), "host": plain(os.uname().nodename, 64)}
    mine["since"] = since or utc_now()
    mine["started"] = start_mark(os.getpid())
    if renewed_at:
        mine["renewed_at"] = round(renewed_at, 3)
    text = json.dumps(mine).encode()
    size = min(os.fstat(fd).st_size, _MAX_HOLDER_BYTES)
    os.pwrite(fd, text.ljust(size - 1) + b"\n", 0)  # at once, never empty: others read it meanwhile
    if renewed_at:
        os.fsync(fd)
