"""Admits one waiter at a time, in order of arrival, and wakes the one that watches the slots.

The others sleep in the kernel. A lock that is released goes to whoever asks next, even a newcomer. On Linux
each waiter therefore locks a byte of the queue's file, its ticket, and waits for the bytes before it; a
newcomer queues if any byte is locked. Other systems cannot lock bytes of an open file, and a newcomer may
overtake. No lock has a timeout, so a waiter with a timeout queues in a thread. After a timeout the thread
stays parked in the queue: the next wait of this process takes over its place and leaves its own; without one,
the thread leaves the queue as soon as it is first.

The watcher is woken as soon as a permit is released. This is only a hint: a holder that is killed sends none,
so a watcher also polls every few milliseconds. It is a datagram socket, because a named pipe in the directory
would block programs that copy or search the directory. On Linux its name is not in the file system.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path

from retrain.base.locks import GUARD, OPEN, Descriptor, LockFile

_BYTES = struct.Struct("hhqqi4x")  # C's struct flock: type, whence, start, length (0: to the end), process
GATE = 0  # the byte that is locked while a ticket is drawn
FIRST_TICKET = 2  # byte 1 is nobody's, so that the bytes before a ticket are never none


class Deadline:
    """How long a waiter waits: forever, until a deadline, or until another thread calls `give_up`."""

    def __init__(self, timeout_s: float | None, *, may_give_up: bool = False) -> None:
        """Start the clock; None waits forever. `may_give_up`: whether `give_up` may be called."""
        self._until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self.is_endless = math.isinf(self._until) and not may_give_up
        self._is_over = False
        self.wake = threading.Event()  # set when the wait is granted, and by `give_up`

    def give_up(self) -> None:
        """End the wait soon; safe to call at any time, from any thread."""
        self._is_over = True
        self.wake.set()

    def left_s(self) -> float:
        """Return the seconds left: 0 or less after the deadline, infinite without one."""
        return 0.0 if self._is_over else self._until - time.monotonic()

    def wait(self) -> None:
        """Sleep until `wake` is set or the deadline passes."""
        left_s = self.left_s()
        self.wake.wait(None if math.isinf(left_s) else max(0.0, left_s))


class Place(LockFile):
    """A waiter's open file of the queue; admitted when it is locked."""

    is_first = False  # admitted on arrival
    _ticket = 0

    def try_first(self) -> bool:
        """Enter if nobody waits and nobody is inside."""
        self.is_first = not self._last_byte(FIRST_TICKET) and self.try_lock()
        return self.is_first

    def draw(self) -> None:
        if sys.platform != "linux":
            return
        self._set_bytes(fcntl.F_WRLCK, GATE)
        last, stride = FIRST_TICKET - 1, 1
        while stride:  # strides grow while tickets are found, then shrink
            if byte := self._last_byte(last + stride):
                last, stride = byte, 2 * stride
            else:
                stride //= 2
        self._ticket = last + 1
        self._set_bytes(fcntl.F_WRLCK, self._ticket)
        self._set_bytes(fcntl.F_UNLCK, GATE)

    def wait(self) -> None:
        """Wait until all that came before have left, then enter."""
        if self._ticket:
            self._set_bytes(fcntl.F_RDLCK, self._ticket - 1)  # the last that came before: wakes once
            self._set_bytes(fcntl.F_RDLCK, 1, self._ticket - 1)  # if that one gave up, those before it
        self.lock()

    def close(self) -> None:
        """Leave, also for a copy that a child inherited: it would keep the bytes locked."""
        with GUARD:
            if self.is_open:
                with contextlib.suppress(OSError):  # closing unlocks as well
                    self._set_bytes(fcntl.F_UNLCK, 0, 0)
            super().close()

    def moved(self) -> Place:
        """Return the same place as another object; closing this one does nothing then."""
        with GUARD:
            other = Place.__new__(Place)
            vars(other).update(vars(self), _fd=-1)  # an interrupt must not leave two that would close it
            OPEN.add(other)
            other._fd, self._fd = self._fd, -1
        return other

    def _last_byte(self, start: int) -> int:
        """Return the last byte of some lock of others from `start` on; 0 without one."""
        if sys.platform != "linux":
            return 0
        request = _BYTES.pack(fcntl.F_WRLCK, os.SEEK_SET, start, 0, 0)
        kind, _, begin, length, _ = _BYTES.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, request))
        return 0 if kind == fcntl.F_UNLCK else begin + length - 1

    def _set_bytes(self, kind: int, start: int, length: int = 1) -> None:
        """Lock or unlock bytes for this open file; waits for others' locks."""
        if sys.platform == "linux":
            request = _BYTES.pack(kind, os.SEEK_SET, start, length, 0)
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLKW, request)


class WaitQueue:
    """A first-come-first-served lock on a file, with timeouts."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._parked: list[_Ticket] = []  # guarded by GUARD

    def arrive(self, *, may_wait: bool) -> Place | None:
        """Enter at once if nobody waits, else take a place to `enter` from; None if it may not wait."""
        place = Place(self._path)
        try:
            if place.try_first():
                return place
            if may_wait:
                place.draw()
                return place
        except BaseException:
            place.close()  # a traceback that is kept must not keep bytes locked
            raise
        place.close()
        return None

    def enter(self, place: Place, deadline: Deadline) -> Place | None:
        """Enter, or return None when the wait ends first; close what is returned, and the place, to leave."""
        if place.is_first:
            return place
        if deadline.is_endless:
            place.wait()
            return place
        ticket = self._take_over(deadline)
        if ticket is None:
            ticket = _Ticket(place.moved(), self._parked, deadline)
        else:
            place.close()  # never two places: the parked one may be the later, and wait for this one
        try:
            deadline.wait()
        except BaseException:
            if not ticket.park():
                ticket.file.close()
            raise
        if ticket.park():
            return None
        if ticket.error is not None:
            ticket.file.close()
            raise ticket.error
        return ticket.file

    def _take_over(self, deadline: Deadline) -> _Ticket | None:
        with GUARD:
            self._parked[:] = [ticket for ticket in self._parked if ticket.file.is_open]
            if not self._parked:
                return None
            ticket = self._parked.pop()
            ticket.deadline = deadline
            return ticket


class _Ticket:
    """A place in the queue, held by a thread."""

    def __init__(self, file: Place, parked: list[_Ticket], deadline: Deadline) -> None:
        self.file = file
        self.deadline = deadline  # of the waiter
        self.error: OSError | None = None  # the end of the wait instead of the lock
        self._is_granted = False
        self._parked = parked  # tickets without a waiter; this one may be among them
        try:
            threading.Thread(target=self._queue, name="permit-queue", daemon=True).start()
        except BaseException:
            file.close()  # `threading` keeps a thread whose start was interrupted for ever, and so the place
            raise

    def park(self) -> bool:
        """Park the ticket; False if it has been granted meanwhile."""
        with GUARD:
            if not self._is_granted:
                self._parked.append(self)
            return not self._is_granted

    def _queue(self) -> None:
        # Signals belong to the main thread; elsewhere than on Linux, one costs the place in the queue.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.file.wait()
        except ValueError:
            return  # closed, because the start of this thread was interrupted
        except OSError as error:  # a file server that is away
            self.error = error
        with GUARD:
            if self in self._parked:
                self._parked.remove(self)
                self.file.close()
            else:
                self._is_granted = True
                self.deadline.wake.set()


def wakeup_address(wait_queue: Path, *, in_file_system: bool = sys.platform != "linux") -> str:
    """Return a semaphore's socket address: from the queue's inode, so it is the same for every path."""
    status = wait_queue.lstat()
    name = f"retrain-permits-{status.st_dev:x}-{status.st_ino:x}"
    return f"/tmp/{name}" if in_file_system else f"\0{name}"


def wake(address: str) -> None:
    """Wake the watcher, if there is one, without waiting."""
    with (
        GUARD,  # or a child forked meanwhile would keep a copy
        contextlib.suppress(OSError),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
    ):
        sender.setblocking(False)
        sender.sendto(b"!", address)


class WakeupListener:
    """The watcher's socket. If the address cannot be bound, `wait` only sleeps."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._poll = select.poll()
        self._socket: Descriptor | None = None
        with (
            GUARD,
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener,
        ):
            self._forget()  # left over by a killed watcher
            listener.bind(address)
            self._socket = Descriptor(listener.detach())
            self._poll.register(self._socket.fileno(), select.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Sleep until woken, or the timeout passes."""
        for fd, _ in self._poll.poll(timeout_s * 1000):
            os.read(fd, 1)

    def close(self) -> None:
        """Free the address for the next watcher."""
        if self._socket is not None:
            self._socket.close()
            self._forget()

    def _forget(self) -> None:
        if not self._address.startswith("\0"):
            Path(self._address).unlink(missing_ok=True)
