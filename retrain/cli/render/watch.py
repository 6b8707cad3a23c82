"""`retrain status --watch`: a view that follows files, on a terminal, as lines, or as JSON.

On a terminal it has its own screen, redrawn when something changed, gone without a trace. Keys, signals and
the pace of looking are here as well; `frame` lays a view out for a size and knows no terminal.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import attrgetter
from pathlib import Path
from types import FrameType

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from retrain.base.errors import EXIT_DONE, EXIT_INTERRUPTED
from retrain.cli.render.frame import event_line, frame
from retrain.cli.render.status import show_all, time_left
from retrain.cli.render.tables import JSON_VERSION, plain_value
from retrain.results.status.watch import View, Watcher

QUIT_KEYS = (b"q", b"Q")
SHARE = 0.015  # of one core: below the 2 % that watching may cost, with room for what is not counted
SHORTEST_S, LONGEST_S = 0.5, 10.0
_KEPT = 0.7  # of the earlier cost in the average: one slow refresh does not make the view sluggish
PROGRESS_EVERY = 0.1  # of a campaign's steps: a line for each tenth


class Request(Enum):
    """What a key or signal asks for."""

    NOTHING = auto()
    REDRAW = auto()  # the terminal has another size
    SUSPEND = auto()  # Ctrl-Z
    QUIT = auto()  # the key
    STOP = auto()  # Ctrl-C or a signal


ENDS = {signal.SIGINT: Request.STOP, signal.SIGTERM: Request.STOP, signal.SIGHUP: Request.STOP}
OF_A_SCREEN = ENDS | {signal.SIGWINCH: Request.REDRAW, signal.SIGTSTP: Request.SUSPEND}


class Inbox:
    """Waits for a timeout, signals and, on a screen, keys; signals are caught and returned by `wait`."""

    def __init__(self, *, has_screen: bool) -> None:
        self._has_screen = has_screen
        self._meaning = OF_A_SCREEN if has_screen else ENDS
        self._out, self._in = os.pipe()
        os.set_blocking(self._in, False)
        self._before = {number: signal.signal(number, self._catch) for number in self._meaning}

    def wait(self, timeout_s: float) -> Request:
        keys = [sys.stdin.fileno()] if self._has_screen and _has_keys() else []
        ready, _, _ = select.select([self._out, *keys], [], [], timeout_s)
        if self._out in ready:
            requests = [self._meaning[signal.Signals(number)] for number in os.read(self._out, 64)]
            return max(requests, key=attrgetter("value"))
        typed = os.read(ready[0], 64) if ready else b"-"
        if not typed:  # the terminal hung up
            return Request.STOP
        return Request.QUIT if typed in QUIT_KEYS else Request.NOTHING

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
    """How long a thread rests between two refreshes: in proportion to what one costs."""

    _cost_s: float = 0.0
    _refreshes: int = 0
    _began_s: float = field(default_factory=time.thread_time)

    def rest_s(self) -> float:
        """Return how long to rest now, from the processor's time since this was last asked."""
        now_s = time.thread_time()
        spent_s, self._began_s = now_s - self._began_s, now_s
        self._refreshes += 1
        if self._refreshes == 1:  # the first one reads everything and tells nothing of the next
            return SHORTEST_S
        self._cost_s = spent_s if self._refreshes == 2 else spent_s * (1 - _KEPT) + self._cost_s * _KEPT
        return min(LONGEST_S, max(SHORTEST_S, self._cost_s / SHARE))


def watch_on_screen(log_dir: Path, console: Console) -> int:
    """Show a directory until the user quits; return the exit code: 0 after `q`, 130 after a signal."""
    watcher = Watcher(log_dir)
    view = watcher.refresh()  # before the screen is taken, so that an error is visible
    with contextlib.closing(Inbox(has_screen=True)) as inbox:
        while True:
            request = _show(watcher.refresh, view, str(log_dir), console, inbox)
            if request is not Request.SUSPEND:
                return EXIT_DONE if request is Request.QUIT else EXIT_INTERRUPTED
            os.kill(os.getpid(), signal.SIGSTOP)  # the screen is restored; continues after `fg`


def _show(refresh: Callable[[], View], view: View, where: str, console: Console, inbox: Inbox) -> Request:
    """Take the screen and keep it up to date until a key or signal; then restore the terminal."""
    interval, shown = RefreshInterval(), None
    quiet = Live(
        console=console, screen=True, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
    )
    with contextlib.suppress(OSError), quiet_keys(), quiet as live:  # OSError: no terminal any more
        while True:
            width, height = console.size
            if (view.campaigns, view.events, width, height) != shown:
                shown = (view.campaigns, view.events, width, height)
                live.update(Lines(frame(view, width, height, where)), refresh=True)
            request = inbox.wait(interval.rest_s())
            if request not in (Request.NOTHING, Request.REDRAW):
                return request
            view = refresh()
    return Request.STOP


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines that fit already: drawn without the wrapping that rich does for text, half of a redraw's cost."""

    lines: Sequence[Text]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self.lines:
            yield from line.render(console)
            yield Segment.line()


def watch_as_lines(log_dir: Path, show: Callable[[View], None]) -> int:
    """Print changes until all runs have ended; return the exit code: 0, or 130 after Ctrl-C or a signal."""
    watcher, interval = Watcher(log_dir), RefreshInterval()
    with contextlib.closing(Inbox(has_screen=False)) as inbox:
        while True:
            view = watcher.refresh()
            show(view)
            sys.stdout.flush()
            if not any(c.status.state == "running" for c in view.campaigns):
                return EXIT_DONE
            if inbox.wait(interval.rest_s()) in (Request.STOP, Request.QUIT):
                return EXIT_INTERRUPTED


class JsonLines:
    """An object a line: `kind` is campaign, run or event; at first everything, then what changed."""

    def __init__(self) -> None:
        self._printed: dict[tuple[str, str], object] = {}

    def show(self, view: View) -> None:
        """Print what changed since the last call."""
        for watched in view.campaigns:
            name = watched.status.id
            for run_id, run in watched.runs.items():
                if self._is_news((name, run_id), run):
                    row = plain_value(run.row) | {"rewards": plain_value(run.rewards)}
                    print(json.dumps({"kind": "run", "campaign": name} | row))
            if self._is_news((name, ""), watched.status):
                row = plain_value(watched.status)
                del row["runs"]
                print(json.dumps({"kind": "campaign", "version": JSON_VERSION} | row))
        for added in view.added:
            row = plain_value(added)
            print(json.dumps({"kind": "event", "event": row.pop("kind")} | row))

    def _is_news(self, key: tuple[str, str], value: object) -> bool:
        before, self._printed[key] = self._printed.get(key), value
        return before is not value and before != value


class PlainLines:
    """The tables of `status` once, then a line for each event and each tenth of a campaign."""

    def __init__(self, console: Console, log_dir: Path) -> None:
        self._console = console
        self._log_dir = log_dir
        self._tenths: dict[str, int] | None = None

    def show(self, view: View) -> None:
        """Print the tables first, then what happened since."""
        statuses = [campaign.status for campaign in view.campaigns]
        tenths = {c.id: int(c.steps_done / (c.steps_total or math.inf) / PROGRESS_EVERY) for c in statuses}
        if self._tenths is not None:
            for added in view.added:
                self._console.print(event_line(added, several=len(statuses) > 1), soft_wrap=True)
            for status in statuses:
                if tenths[status.id] > self._tenths.get(status.id, 0):
                    line = f"{status.id}: {status.state}, {status.steps_done}/{status.steps_total} steps"
                    line += f", {time_left(status)}" if status.eta_s is not None else ""
                    self._console.print(line, soft_wrap=True)
        elif statuses:
            show_all(statuses, self._console)
        else:
            self._console.print(f"{self._log_dir}: no campaigns yet", soft_wrap=True)
        self._tenths = tenths
