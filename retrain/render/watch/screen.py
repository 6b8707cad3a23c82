"""The live view on a terminal: its own screen, redrawn when something changed, gone without a trace."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.text import Text

from retrain.errors import EXIT_DONE, EXIT_INTERRUPTED
from retrain.render.watch.frame import frame
from retrain.render.watch.glyphs import ASCII, FULL, Glyphs
from retrain.render.watch.terminal import Asked, Inbox, RefreshInterval, quiet_keys
from retrain.status.watch import View, Watcher


def watch_on_screen(log_dir: Path, console: Console) -> int:
    """Show a directory until the user quits.

    Returns:
        The exit code: 0 after `q`, 130 after Ctrl-C or a signal.

    Raises:
        RecordsError: there is no such directory.
    """
    watcher, glyphs = Watcher(log_dir), glyphs_for(console)
    view = watcher.look()  # before the screen is taken, so that an error is visible
    inbox = Inbox(has_screen=True)
    try:
        while True:
            asked = _show(watcher.look, view, str(log_dir), console, glyphs, inbox)
            if asked is not Asked.SUSPEND:
                return EXIT_DONE if asked is Asked.QUIT else EXIT_INTERRUPTED
            os.kill(os.getpid(), signal.SIGSTOP)  # the screen is restored; continues after `fg`
    finally:
        inbox.close()


def glyphs_for(console: Console) -> Glyphs:
    """Choose characters that the terminal's encoding has."""
    try:
        "".join((FULL.levels, FULL.done, FULL.failed, FULL.interrupted, FULL.bar)).encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return FULL


def _show(
    look: Callable[[], View], view: View, where: str, console: Console, glyphs: Glyphs, inbox: Inbox
) -> Asked:
    """Take the screen and keep it up to date until a key or signal; then restore the terminal."""
    interval, shown = RefreshInterval(), None
    with (
        contextlib.suppress(OSError),
        quiet_keys(),
        _screen(console) as live,
    ):  # OSError: no terminal any more
        while True:
            width, height = console.size
            if (view.campaigns, view.events, width, height) != shown:
                shown = (view.campaigns, view.events, width, height)
                live.update(Lines(frame(view, width, height, where, glyphs)), refresh=True)
            asked = inbox.wait(interval.rest_s())
            if asked not in (Asked.NOTHING, Asked.REDRAW):
                return asked
            view = look()
    return Asked.STOP


class Lines:
    """Lines that fit already: drawn without the wrapping that rich does for text, half of a redraw's cost."""

    def __init__(self, lines: Sequence[Text]) -> None:
        self._lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in self._lines:
            yield from line.render(console)
            yield Segment.line()


def _screen(console: Console) -> Live:
    return Live(
        Text(),
        console=console,
        screen=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )
