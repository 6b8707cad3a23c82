"""Keys, signals and time for the live view; restores the terminal afterwards."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from types import FrameType

QUIT_KEYS = (b"q", b"Q")
SHARE = 0.015  # of one core: below the 2 % that watching may cost, with room for what is not counted
SHORTEST_S, LONGEST_S = 0.5, 10.0
_KEPT = 0.7  # of the earlier cost in the average: one slow look does not make the view sluggish


class Asked(Enum):
    """What a key or signal asked for."""

    NOTHING = auto()
    REDRAW = auto()  # the terminal has another size
    SUSPEND = auto()  # Ctrl-Z
    QUIT = auto()  # the key
    STOP = auto()  # Ctrl-C or a signal


ENDS = {signal.SIGINT: Asked.STOP, signal.SIGTERM: Asked.STOP, signal.SIGHUP: Asked.STOP}
OF_A_SCREEN = ENDS | {signal.SIGWINCH: Asked.REDRAW, signal.SIGTSTP: Asked.SUSPEND}


class Inbox:
    """Waits for a timeout, signals and, on a screen, keys; signals are caught and returned by `wait`."""

    def __init__(self, *, has_screen: bool) -> None:
        self._has_screen = has_screen
        self._meaning = OF_A_SCREEN if has_screen else ENDS
        self._out, self._in = os.pipe()
        os.set_blocking(self._in, False)
        self._before = {number: signal.signal(number, self._catch) for number in self._meaning}

    def wait(self, timeout_s: float) -> Asked:
        """Wait for a request or until the timeout."""
        keys = [sys.stdin.fileno()] if self._has_screen and _has_keys() else []
        ready, _, _ = select.select([self._out, *keys], [], [], timeout_s)
        if self._out in ready:
            asked = [self._meaning[signal.Signals(number)] for number in os.read(self._out, 64)]
            return max(asked, key=lambda one: one.value)
        typed = os.read(ready[0], 64) if ready else b"-"
        if not typed:  # the terminal hung up
            return Asked.STOP
        return Asked.QUIT if typed in QUIT_KEYS else Asked.NOTHING

    def close(self) -> None:
        """Restore the earlier signal handlers."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self._out)
        os.close(self._in)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        del frame
        with contextlib.suppress(BlockingIOError):  # full: enough was asked for
            os.write(self._in, bytes([number]))


@contextlib.contextmanager
def quiet_keys() -> Iterator[None]:
    """Read keys unbuffered and without echo; discard what was typed afterwards."""
    if not _has_keys():
        yield
        return
    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    tty.setcbreak(stdin)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(stdin, termios.TCSAFLUSH, before)


def _has_keys() -> bool:
    try:
        return os.isatty(sys.stdin.fileno()) and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError, AttributeError):  # closed, or no terminal of ours
        return False


@dataclass
class RefreshInterval:
    """How long to rest between two looks: in proportion to what a look costs."""

    share: float = SHARE
    _cost_s: float = 0.0
    _looks: int = 0
    _began_s: float = field(default_factory=time.process_time)

    def rest_s(self) -> float:
        """Return how long to rest now, from the processor's time since this was last asked."""
        now_s = time.process_time()
        spent_s, self._began_s = now_s - self._began_s, now_s
        self._looks += 1
        if self._looks == 1:  # the first look reads everything and tells nothing of the next
            return SHORTEST_S
        self._cost_s = spent_s if self._looks == 2 else spent_s * (1 - _KEPT) + self._cost_s * _KEPT
        return min(LONGEST_S, max(SHORTEST_S, self._cost_s / self.share))
