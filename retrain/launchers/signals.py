"""Signals to processes that are not our children, only once they are proven to be the right ones."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from retrain.locks.held import LockHolder, holder, is_held, start_mark

TRIES = 100  # a process writes itself into a lock a moment after it takes it
PAUSE_S = 0.01


def signal_holder(lock: Path, number: int) -> bool:
    """Signal the process that holds a lock; SIGKILL goes to everything in its process group as well.

    Returns:
        False if nobody holds the lock, or its holder is on another machine or cannot be identified.
    """
    for _ in range(TRIES):
        found = holder(lock)
        if not is_held(lock) or (found is not None and not found.is_here):
            return False
        if found is not None and _signal(found, number):
            return True
        time.sleep(PAUSE_S)
    return False


def _signal(found: LockHolder, number: int) -> bool:
    try:
        # a pidfd stays this process's, even if its id is reused
        fd = _open_process(found.pid)
        try:
            if not found.started or start_mark(found.pid) != found.started:
                return False
            if number == signal.SIGKILL and os.getpgid(found.pid) == found.pid:
                os.killpg(found.pid, number)
            elif sys.platform == "linux" and fd is not None:
                signal.pidfd_send_signal(fd, number)
            else:
                os.kill(found.pid, number)
            return True
        finally:
            if fd is not None:
                os.close(fd)
    except ProcessLookupError:
        return False


def _open_process(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid) if sys.platform == "linux" else None
    except ProcessLookupError:
        raise
    except OSError:  # too old a kernel, or a sandbox that forbids it
        return None
