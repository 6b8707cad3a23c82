"""Threads that compute after the call that they were for was given up.

Nothing in Python ends a thread, and one that computes holds the interpreter's lock for most of the time,
which slows down every other thread. So an exit is raised in it, which ends all but code that catches every
exception or computes in C; a thread that waits is left alone. That there was one is remembered.
"""

from __future__ import annotations

import threading
import time

LOOK_S, LOOKS = 0.2, 10  # between looks at a thread's processor time, and so many of them
BUSY = 0.1  # share of the time that a thread computes
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

    is_noted = False
    for _ in range(LOOKS):
        if not _computes(thread):
            return
        if not is_noted:
            _NAMES.append(what)
            is_noted = True
        number = ctypes.c_ulong(thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(SystemExit))


def _computes(thread: threading.Thread) -> bool:
    before_s, began_s = _processor_s(thread), time.monotonic()
    thread.join(LOOK_S)
    after_s = _processor_s(thread)
    return after_s - before_s > BUSY * (time.monotonic() - began_s)


def _processor_s(thread: threading.Thread) -> float:
    """Return the processor time of a thread; 0 if it has ended, or the system does not tell."""
    clock = getattr(time, "pthread_getcpuclockid", None)
    if clock is None or not thread.is_alive() or thread.ident is None:
        return 0.0
    try:
        return time.clock_gettime(clock(thread.ident))
    except OSError:  # it ends at this moment
        return 0.0
