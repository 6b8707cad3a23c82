"""Liveness by locks: a process holds one while it lives, and the kernel releases it however the process ends.

A lock is `flock` on a file that is never unlinked, and belongs to the open file, which a fork shares: a child
that kept its copy would hold the parent's permit after the parent's death. Every descriptor is therefore
registered here, and a child closes its copies (closing a copy keeps the parent's lock; unlocking it would
not). This is not `filelock`, the plain lock elsewhere: these locks name their holder and renew a lease, and a
permit's slot is locked by the first in a queue and passed on, and waiters sleep in the kernel in order.

A network file system may silently keep locks local to each machine. A holder that other machines need to
see therefore renews a lease: it writes the time into its lock file every few seconds. Only machines other
than its own (another host name, or another boot) rely on the lease. Clocks of two machines may differ, so
a process that wants the lock watches whether the lease is renewed instead of comparing times. A signal to a
holder, which need not be our child, is sent only once the kernel says that this process holds the lock, and
only to a process of the same user: anybody who can write to a directory can write any process into its lock
files.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakSet

from retrain.base.clock import utc_now
from retrain.base.errors import RecordsError, records_error

if TYPE_CHECKING:
    import psutil

FIRST_POLL_S, LONGEST_POLL_S = 0.001, 0.05  # between tries of a lock; doubled each time, as many may wait
_START_TIME = 19  # field 22 of /proc/PID/stat, counted after the name, which may contain blanks and brackets

# Held during a fork and while a descriptor is opened or closed, so that a child sees them all.
# Re-entrant, because a signal handler or the garbage collector may close one at any point.
GUARD = threading.RLock()
OPEN: WeakSet[Descriptor] = WeakSet()

_PROBE_WAIT_S = 1.0  # another process's `is_held` lasts microseconds, longer on a machine that swaps
_PAUSE_S = 0.002
_MAX_HOLDER_BYTES = 4096
RENEW_S = 10.0  # a write of 200 bytes this often costs a file server nothing, even times a thousand
LEASE_S = 60.0  # a lease not renewed for this long is not shown as alive
WATCH_S = 25.0  # 2.5 renewal periods: without a renewal in this time, the holder is dead
WATCH_PAUSE_S = 0.5
STALE_S = 600.0  # older than any clock difference in a cluster (munge allows half of it): no need to watch

_held: set[LockFile] = set()


class Descriptor:
    """One file descriptor; closed when dropped, and in a forked child."""

    _fd = -1  # until it is opened, which may fail

    def __init__(self, fd: int) -> None:
        """Own `fd`; call with `GUARD` held since before it was opened."""
        self._fd = fd
        OPEN.add(self)

    def fileno(self) -> int:
        """Return the descriptor's number, or -1 once closed."""
        return self._fd

    @property
    def is_open(self) -> bool:
        """Whether it is open in this process: it is closed in a forked child."""
        return self._fd >= 0

    def close(self) -> None:
        """Close it; safe to call twice."""
        with GUARD:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def __del__(self, suppress: type = contextlib.suppress) -> None:
        # already closed by number elsewhere; or the interpreter ends, and this module's names are gone
        with suppress(OSError, AttributeError, TypeError):
            self.close()


class LockFile(Descriptor):
    """An open file and its `flock`. Two of them exclude each other, even in one process."""

    def __init__(self, path: str, *, read_only: bool = False) -> None:
        with GUARD:
            super().__init__(open_regular(path, os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT))

    def lock(self, *, shared: bool = False) -> None:
        """Wait in the kernel, first come first served, for the lock."""
        fcntl.flock(self._fd, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)

    def try_lock(self, *, shared: bool = False) -> bool:
        """Lock without waiting; False if another process or thread holds it."""
        try:
            fcntl.flock(self._fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # the error depends on the system
            return False
        return True

    def unlock(self) -> None:
        """Unlock for every copy of the descriptor, including one that a child inherited."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Unlock and close; safe to call twice."""
        with GUARD:
            if self.is_open:
                with contextlib.suppress(OSError):  # a file server that is away: closing unlocks as well
                    self.unlock()
            super().close()


@contextlib.contextmanager
def locked(path: Path, longest_s: float | None = None) -> Iterator[None]:
    """Hold the lock of a file, made if it is missing, which a forked child does not keep.

    With `longest_s`, holders touch the file: many in turn are told from one that is stopped.

    Raises:
        TimeoutError: another process has held it for `longest_s`, so it may be stopped.
    """
    with contextlib.closing(LockFile(str(path))) as file:
        if longest_s is None:
            file.lock()
            yield
            return
        touched, give_up_s, pause_s = None, 0.0, FIRST_POLL_S
        while not file.try_lock():
            if touched != (now := os.fstat(file.fileno()).st_mtime_ns):
                touched, give_up_s = now, time.monotonic() + longest_s
            elif time.monotonic() > give_up_s:
                raise TimeoutError(f"another process has held it for {longest_s:g} s; is it stopped?")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_POLL_S)
        os.utime(file.fileno())
        yield


def open_regular(path: str, flags: int) -> int:
    """Open a file, created with mode 0600 if `flags` say so, without following a symbolic link.

    Raises:
        FileNotFoundError: it does not exist and `flags` do not create it.
        RecordsError: it is a link or not a regular file, or it cannot be opened.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        raise
    except NotADirectoryError as error:
        raise FileNotFoundError(path) from error
    except OSError as error:
        raise records_error(Path(path), "open", error) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise RecordsError(f"{path}: is not a regular file; remove it")
    return fd


def is_in_place(path: Path, fd: int) -> bool:
    """Whether a path still names the open file; True while the file system cannot be asked."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # an unavailable file server has not lost the file
        return True


@dataclass(frozen=True)
class LockHolder:
    """The process that a lock file names. A pid may be reused: compare `started` before sending a signal."""

    pid: int
    host: str
    since: str
    started: str = ""  # `start_mark` of that process; "" if not known
    renewed_at: float = 0.0  # by the wall clock of `host`; 0 if it renews no lease

    @property
    def is_here(self) -> bool:
        """Whether it runs under this kernel, whose locks then tell whether it is alive."""
        return self.host == _host() and is_of_this_boot(self.started)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"

    def is_same_process(self, other: LockHolder) -> bool:
        """Whether both are the same process, whatever the state of its lease."""
        return (self.pid, self.host, self.started) == (other.pid, other.host, other.started)


class HeldLock:
    """A lock that this process holds until `release`, the end of its `with` block, or its death."""

    def __init__(self, path: Path, file: LockFile) -> None:
        self.path = path
        self._file = file
        self._since = utc_now()
        self._released = threading.Event()
        self._renewal: threading.Thread | None = None
        _held.add(file)  # dropping the object does not release the lock

    @property
    def is_in_place(self) -> bool:
        """Whether the file is still where others look for it: its directory may have been removed."""
        return is_in_place(self.path, self._file.fileno())

    def renew(self, every_s: float = RENEW_S) -> None:
        """Renew a lease from now on, for machines that do not see the lock."""
        _write_holder(self._file, self._since, time.time())

        def go_on() -> None:
            while not self._released.wait(every_s):
                with contextlib.suppress(OSError):  # a full disk: the lease expires, the lock stays
                    _write_holder(self._file, self._since, time.time())

        self._renewal = threading.Thread(target=go_on, name="lease", daemon=True)
        self._renewal.start()

    def release(self) -> None:
        """Release the lock; safe to call twice, and in a forked child, which does not hold it."""
        if self._renewal is not None and self._file.is_open:
            self._released.set()
            self._renewal.join()
            with contextlib.suppress(OSError):
                _write_holder(self._file, self._since)
        _held.discard(self._file)
        self._file.close()

    def __enter__(self) -> HeldLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def hold(path: Path, watch_s: float = WATCH_S) -> HeldLock | None:
    """Take the lock until this process ends or releases it; None if another process holds it.

    Returns at once if it is held, except for two waits: for probes of `is_held`, which last microseconds,
    and for another machine's lease, which is watched for `watch_s` seconds.

    Raises:
        RecordsError: the file cannot be opened, or its file system has no locks.
    """
    file = LockFile(str(path))
    lock = HeldLock(path, file)
    try:
        if not _lock(file) or _is_renewed_elsewhere(path, watch_s):
            lock.release()
            return None
        _write_holder(file)
    except OSError as error:
        lock.release()
        raise records_error(path, "lock", error) from error
    return lock


def is_held(path: Path) -> bool:
    """Whether a live process holds the lock; False without a file, RecordsError if it cannot be opened."""
    try:
        with closing(LockFile(str(path), read_only=True)) as file:
            if not file.try_lock(shared=True):
                return True
    except FileNotFoundError:
        return False
    except OSError as error:
        raise records_error(path, "lock", error) from error
    leased = _lease_elsewhere(path)
    return leased is not None and -STALE_S < time.time() - leased.renewed_at < LEASE_S


def is_abandoned(path: Path) -> bool:
    """Whether certainly no live process holds the lock; another machine's lease is watched for `WATCH_S`."""
    return not is_held(path) and not _is_renewed_elsewhere(path)


def holder(path: Path) -> LockHolder | None:
    """Return the process that took the lock last, for a message; None if unknown."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        record = json.loads(os.read(fd, _MAX_HOLDER_BYTES))
        return LockHolder(
            pid=int(record["pid"]),
            host=_printable(str(record["host"]), 64),
            since=_printable(str(record["since"]), 32),
            started=str(record.get("started", "")),
            renewed_at=float(record.get("renewed_at", 0.0)),
        )
    except (OSError, ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    finally:
        os.close(fd)


def present_holder(path: Path) -> LockHolder | None:
    """Return the holder of a lock that was just found held; None if unknown or already released.

    A holder writes its name into the file a moment after it takes the lock; until then the file names its
    predecessor.
    """
    deadline = time.monotonic() + _PROBE_WAIT_S
    while True:
        named = holder(path)
        if named and not (named.is_here and named.started and start_mark(named.pid) != named.started):
            return named
        if time.monotonic() > deadline or not is_held(path):
            return None
        time.sleep(_PAUSE_S)


def proven_holder(path: Path) -> LockHolder | None:
    """Return the holder of a lock that lives here, is this user's, and holds it by the kernel's account.

    Root may stop whom the file's owner could: the file and the process belong to the same user.
    """
    holder_now = present_holder(path) if is_held(path) else None
    if holder_now is None or not holder_now.is_here or not holder_now.started:
        return None
    import psutil  # not at the top: workers signal nobody

    try:
        file = path.lstat()
        process = psutil.Process(holder_now.pid)
        user = os.geteuid() or file.st_uid
        is_ours = process.uids().real == user
    except (OSError, psutil.Error, ValueError):
        return None
    return holder_now if is_ours and _holds(process, path, file) else None


def _holds(process: psutil.Process, path: Path, file: os.stat_result) -> bool:
    """Whether the kernel says that a process holds an exclusive lock on a file.

    Where it does not list locks (other systems than Linux), whether the process has the file open.
    """
    import psutil

    try:
        lines = Path("/proc/locks").read_text(errors="replace").splitlines()
    except OSError:
        try:
            return any(os.path.samestat(Path(entry.path).stat(), file) for entry in process.open_files())
        except (OSError, psutil.Error):
            return False
    is_named = os.major(file.st_dev) != 0  # btrfs and overlayfs show a file another device than its locks
    device = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}"
    for line in lines:  # 1: FLOCK ADVISORY WRITE 708 08:01:1311 0 EOF; one who waits has "->" before FLOCK
        fields = line.split()
        if len(fields) < 6 or fields[1] == "->" or fields[3] != "WRITE" or fields[4] != str(process.pid):
            continue
        where, _, inode = fields[5].rpartition(":")
        if inode == str(file.st_ino) and (where == device or not is_named):
            return True
    return False


def signal_holder(path: Path, number: int) -> bool:
    """Signal the process that holds a lock; SIGKILL goes to everything in its process group as well.

    Returns:
        False if nobody holds the lock, or its holder is on another machine, is another user's or is not
        proven to hold it.
    """
    holder_now = proven_holder(path)
    return holder_now is not None and signal_process(holder_now, number)


def signal_process(proven: LockHolder, number: int) -> bool:
    """Signal a process that was proven to hold a lock, if it still lives, whatever it still holds."""
    fd = -1
    try:
        if sys.platform == "linux":  # a pidfd stays this process's, even if its id is reused
            with contextlib.suppress(OSError):  # too old a kernel, or a sandbox that forbids it
                fd = os.pidfd_open(proven.pid)
        if start_mark(proven.pid) != proven.started:
            return False
        if number == signal.SIGKILL and os.getpgid(proven.pid) == proven.pid:
            os.killpg(proven.pid, number)
        elif fd >= 0:
            signal.pidfd_send_signal(fd, number)
        else:
            os.kill(proven.pid, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        if fd >= 0:
            os.close(fd)


def start_mark(pid: int) -> str:
    """Return a mark of when a process started, which no other process with this id has; "" without a process.

    One that has ended is none, also before its parent has waited for it. On Linux the mark is relative to the
    boot and names the boot, so that setting the clock changes nothing.
    """
    if sys.platform == "linux":
        try:
            after_name = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2]
            fields = after_name.split()
            return "" if fields[0] == "Z" else f"{boot_id()}:{fields[_START_TIME]}"
        except (OSError, IndexError):
            return ""
    import psutil

    try:
        return str(psutil.Process(pid).create_time())
    except (psutil.Error, ValueError):
        return ""


def is_of_this_boot(mark: str) -> bool:
    """Whether a process with this mark belongs to the machine's current boot; True if it names none."""
    boot, named, _ = mark.partition(":")
    return sys.platform != "linux" or not named or boot == boot_id()


@cache
def boot_id() -> str:
    """Return the id of the current boot; the host name if the system has no such id."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else os.uname().nodename


def _lock(file: LockFile) -> bool:
    deadline = time.monotonic() + _PROBE_WAIT_S
    while not file.try_lock():
        # A shared lock succeeds during probes, and fails if the lock is held.
        if not file.try_lock(shared=True) or time.monotonic() > deadline:
            return False
        file.unlock()
        time.sleep(_PAUSE_S * (1 + os.urandom(1)[0] / 255))  # random, so that two starters differ
    return True


def _lease_elsewhere(path: Path) -> LockHolder | None:
    """Return the holder of a lease that another machine renewed; None if there is none."""
    first = holder(path)
    return first if first is not None and first.renewed_at > 0 and not first.is_here else None


def _is_renewed_elsewhere(path: Path, watch_s: float = WATCH_S) -> bool:
    """Watch another machine's lease for a renewal; False if there is no lease, or it is stale."""
    first = _lease_elsewhere(path)
    if first is None or time.time() - first.renewed_at > STALE_S:
        return False
    until = time.monotonic() + watch_s
    while time.monotonic() < until:
        time.sleep(WATCH_PAUSE_S)
        latest = holder(path)  # opening the file makes a network file system refresh it
        if latest is not None and latest != first:
            return latest.renewed_at > 0
    return False


def _write_holder(file: LockFile, since: str = "", renewed_at: float = 0.0) -> None:
    fd = file.fileno()
    mine = LockHolder(os.getpid(), _host(), since or utc_now(), start_mark(os.getpid()), round(renewed_at, 3))
    text = json.dumps(asdict(mine)).encode()
    size = min(os.fstat(fd).st_size, _MAX_HOLDER_BYTES)
    os.pwrite(fd, text.ljust(size - 1) + b"\n", 0)  # one write, never empty: others may read it at any time
    if renewed_at:
        os.fsync(fd)


def _host() -> str:
    return _printable(os.uname().nodename, 64)


def _printable(text: str, limit: int) -> str:
    """Return text without control and invisible characters: any process may write to a lock file."""
    return "".join(filter(str.isprintable, text))[:limit]


def _forget_in_child() -> None:
    for descriptor in list(OPEN):
        Descriptor.close(descriptor)
    GUARD.release()


os.register_at_fork(before=GUARD.acquire, after_in_parent=GUARD.release, after_in_child=_forget_in_child)
