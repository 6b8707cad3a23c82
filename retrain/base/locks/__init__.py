"""What locks are made of: `flock` on descriptors that a forked child does not keep, and marks of processes.

A lock belongs to the open file, which a fork shares: a child that kept its copy would hold the
parent's permit after the parent's death. Every descriptor is therefore registered here, and a child closes
its copies (closing a copy keeps the parent's lock; unlocking it would not). Permits do not use `filelock`,
because a slot is locked by the first in a queue and passed on, and waiters sleep in the kernel in order.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import sys
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from weakref import WeakSet

from retrain.base.errors import RecordsError, records_error

FIRST_POLL_S, LONGEST_POLL_S = 0.001, 0.05  # between tries of a lock; doubled each time, as many may wait
_START_TIME = 19  # field 22 of /proc/PID/stat, counted after the name, which may contain blanks and brackets

# Held during a fork and while a descriptor is opened or closed, so that a child sees them all.
# Re-entrant, because a signal handler or the garbage collector may close one at any point.
GUARD = threading.RLock()
OPEN: WeakSet[Descriptor] = WeakSet()


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


def start_mark(pid: int) -> str:
    """Return a mark of when a process started, which no other process with this id has; "" without a process.

    On Linux it is relative to the boot and names the boot, so that setting the clock changes nothing.
    """
    if sys.platform == "linux":
        try:
            after_name = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2]
            return f"{boot_id()}:{after_name.split()[_START_TIME]}"
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


def _forget_in_child() -> None:
    for descriptor in list(OPEN):
        Descriptor.close(descriptor)
    GUARD.release()


os.register_at_fork(before=GUARD.acquire, after_in_parent=GUARD.release, after_in_child=_forget_in_child)
