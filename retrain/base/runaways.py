"""Threads that compute after the call that they were for was given up.

Nothing in Python ends a thread, and one that computes holds the interpreter's lock for most of the time,
which slows down every other thread. So an exit is raised in it, which ends all but code that catches every
exception or computes in C; where it does not end, threads pass the lock on fifty times as often. A thread
that waits is left alone. That one computed is remembered.

Time is the processor's: on a busy machine, or as one of many, a thread that computes has little of it.
"""

from __future__ import annotations

import sys
import threading
import time

POLL_S, EXITS = 0.2, 4  # between two checks of a thread; exits that are raised in it
COMPUTED_S = 0.1  # processor time of a thread that computes; one that polls each 10 ms takes 65 s for it
WATCHED_S = 10.0  # processor time of the process after which a thread that has not used so much waits
LONGEST_S = 60.0  # wall time after which it waits
SWITCH_S = 1e-4  # that a thread keeps the interpreter's lock, from when one of them cannot be ended
_NAMES: list[str] = []  # what each runaway thread was for, in the order found


def count() -> int:
    """Return how many threads of this process have computed on after they were given up."""
    return len(_NAMES)


def last() -> str:
    """Return what the last of them was for."""
    return _NAMES[-1]


def give_up(thread: threading.Thread, what: str) -> None:
    """End a thread if it computes; one that waits, or ends, is left alone. Returns at once."""
    threading.Thread(target=_end, args=(thread, what), name="runaway", daemon=True).start()


def _end(thread: threading.Thread, what: str) -> None:
    import ctypes  # here: few processes need it, and many import this module

    if not _computes(thread):
        return
    _NAMES.append(what)
    for _ in range(EXITS):
        number = ctypes.c_ulong(thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(SystemExit))
        if not _computes(thread):
            return
    sys.setswitchinterval(SWITCH_S)


def _computes(thread: threading.Thread) -> bool:
    """Watch a thread until it has computed, or the process has without it, or it has ended."""
    used_s = _processor_s(thread)
    last_s, last_used_s = time.monotonic() + LONGEST_S, time.process_time() + WATCHED_S
    while thread.is_alive() and time.monotonic() < last_s and time.process_time() < last_used_s:
        thread.join(POLL_S)
        if _processor_s(thread) - used_s > COMPUTED_S:
            return True
    return False


def _processor_s(thread: threading.Thread) -> float:
    """Return the processor time of a thread; 0 if it has ended, or the system does not tell."""
    clock = getattr(time, "pthread_getcpuclockid", None)
    if clock is None or not thread.is_alive() or thread.ident is None:
        return 0.0
    try:
        return time.clock_gettime(clock(thread.ident))
    except OSError:  # it ends at this moment
        return 0.0
