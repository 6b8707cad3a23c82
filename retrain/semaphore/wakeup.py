"""Wakes the waiter that watches the slots as soon as a permit is released.

Only a hint: without it, a watcher polls every few milliseconds. It is a datagram socket, because a named
pipe in the directory would block programs that copy or search the directory. On Linux its name is not in
the file system.

A holder that is killed sends nothing; the kernel then tells the watcher that the process ended (pidfd).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from retrain.locks.descriptors import GUARD, Descriptor


def wakeup_address(wait_queue: Path, *, in_file_system: bool = sys.platform != "linux") -> str:
    """Return a semaphore's socket address, derived from its turnstile's inode: the same for every path."""
    status = wait_queue.lstat()
    name = f"retrain-permits-{status.st_dev:x}-{status.st_ino:x}"
    return f"/tmp/{name}" if in_file_system else f"\0{name}"


def wake(address: str) -> None:
    """Wake the watcher, if there is one, without waiting."""
    with contextlib.suppress(OSError):
        with GUARD:  # else two threads could both open a socket
            sender = _sender()
        sender.sendto(b"!", address)


@cache
def _sender() -> socket.socket:
    sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sender.setblocking(False)
    return sender


class WakeupListener:
    """The watcher's socket. If the address cannot be bound, `wait` only sleeps."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._poll = select.poll()
        self._socket: Descriptor | None = None
        self._followed: dict[int, Descriptor] = {}  # processes, by descriptor
        with GUARD, contextlib.suppress(OSError):
            self._socket = _bound(address)
            self._poll.register(self._socket.fileno(), select.POLLIN)

    def follow(self, pids: Iterable[int]) -> None:
        """Wake when one of these processes ends as well (Linux); unknown ids are skipped."""
        if sys.platform != "linux":
            return
        for pid in pids:
            with GUARD, contextlib.suppress(OSError, OverflowError):  # a record may hold anything
                process = Descriptor(os.pidfd_open(pid))
                self._followed[process.fileno()] = process
                self._poll.register(process.fileno(), select.POLLIN)

    def wait(self, timeout_s: float) -> None:
        """Sleep until woken, a followed process ends, or the timeout passes."""
        for fd, _ in self._poll.poll(timeout_s * 1000):
            if process := self._followed.pop(fd, None):
                self._poll.unregister(fd)  # otherwise it would wake us forever
                process.close()
            else:
                os.read(fd, 1)

    def close(self) -> None:
        """Free the address for the next watcher."""
        for process in self._followed.values():
            process.close()
        if self._socket is not None:
            self._socket.close()
            if not self._address.startswith("\0"):
                Path(self._address).unlink(missing_ok=True)


def _bound(address: str) -> Descriptor:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        if not address.startswith("\0"):
            Path(address).unlink(missing_ok=True)  # left over by a killed watcher
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return Descriptor(listener.detach())
