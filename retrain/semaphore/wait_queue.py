"""Admits one waiter at a time, in order of arrival; the others sleep in the kernel.

`flock` has no timeout, so a waiter with a timeout queues in a thread. After a timeout the thread stays
parked in the queue: the next wait of this process takes over its place; without one, the thread
releases the turnstile as soon as it gets it.
"""

from __future__ import annotations

import math
import signal
import threading
import time

from retrain.locks.descriptors import GUARD, LockFile


class Patience:
    """How long a waiter waits: forever, until a deadline, or until another thread calls `give_up`."""

    def __init__(self, timeout_s: float | None, *, may_give_up: bool = False) -> None:
        """Start the clock.

        Args:
            timeout_s: maximum wait; None waits forever.
            may_give_up: whether `give_up` may be called.
        """
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


class WaitQueue:
    """A first-come-first-served lock on a file, with timeouts."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._parked: list[_Ticket] = []  # guarded by GUARD

    def try_enter(self) -> LockFile | None:
        """Enter without waiting if it is free, else return None; close the file to leave."""
        file = LockFile(self._path)
        return file if file.try_lock() else None

    def enter(self, patience: Patience) -> LockFile | None:
        """Enter, or return None when the wait ends first; close the file to leave."""
        if not patience.is_endless:
            return self._enter_in_time(patience)
        file = LockFile(self._path)
        file.lock()
        return file

    def _enter_in_time(self, patience: Patience) -> LockFile | None:
        ticket = self._take_over(patience) or _Ticket(LockFile(self._path), self._parked, patience)
        try:
            patience.wait()
        except BaseException:
            if not ticket.park():
                ticket.file.close()
            raise
        return None if ticket.park() else ticket.file

    def _take_over(self, patience: Patience) -> _Ticket | None:
        with GUARD:
            self._parked[:] = [ticket for ticket in self._parked if ticket.file.is_open]
            if not self._parked:
                return None
            ticket = self._parked.pop()
            ticket.patience = patience
            return ticket


class _Ticket:
    """A place in the queue, held by a thread."""

    def __init__(self, file: LockFile, parked: list[_Ticket], patience: Patience) -> None:
        self.file = file
        self.patience = patience  # of the waiter
        self._is_granted = False
        self._parked = parked  # tickets without a waiter; this one may be among them
        threading.Thread(target=self._queue, name="permit-queue", daemon=True).start()

    def park(self) -> bool:
        """Park the ticket; False if it has been granted meanwhile."""
        with GUARD:
            if not self._is_granted:
                self._parked.append(self)
            return not self._is_granted

    def _queue(self) -> None:
        # Signals belong to the main thread; one that interrupts flock costs the place in the queue.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self.file.lock()
        with GUARD:
            if self in self._parked:
                self._parked.remove(self)
                self.file.close()
            else:
                self._is_granted = True
                self.patience.wake.set()
