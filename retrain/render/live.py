"""A campaign as it runs: event lines, on a terminal with its view below. All of it on standard error."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from rich.console import Console
from rich.live import Live
from rich.text import Text

from retrain.campaign import Observer
from retrain.campaign.endings import Ending
from retrain.errors import RecordsError
from retrain.plan.matrix import RunPlan
from retrain.records.layout import CampaignFiles
from retrain.records.text import count_of, format_duration
from retrain.render.frame import campaign_frame
from retrain.render.tables import BAD, STYLES
from retrain.render.watch import Lines, RefreshInterval, glyphs_for
from retrain.status.watch import Watcher

MOST_LINES = 20  # of the view; at most half of the screen


class EventLines(Observer):
    """Prints a line for each event; after a failure, the last lines of the run's output."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started: dict[str, float] = {}
        self._done = 0
        self._total = 0

    def begun(self, files: CampaignFiles, runs: Sequence[RunPlan], workers: int) -> None:
        self._total = len(runs)
        self._print(f"{count_of(len(runs), 'run')}, {workers} at a time, records in {files.directory}")

    def started(self, run: RunPlan) -> None:
        self._started[run.run_id] = time.monotonic()
        self._print(f"started {run.title}")

    def ended(self, run: RunPlan, ending: Ending, tail: Sequence[str]) -> None:
        self._done += 1
        started = self._started.get(run.run_id)
        took_s = ending.took_s  # not measured here, because an engine is polled only now and then
        if took_s is None and started is not None:
            took_s = time.monotonic() - started
        took = f" after {format_duration(took_s)}" if took_s is not None else ""
        what = f" {run.title}{took} ({self._done} of {self._total})"
        message = f": {ending.message}" if ending.message else ""
        line = Text.assemble((ending.state.value, STYLES.get(ending.state.value, BAD)), what, message)
        self._print(line)
        for said in tail:
            self._console.print(f"    {said}", style="dim", soft_wrap=True)

    def retrying(self, run: RunPlan, ending: Ending, delay_s: float) -> None:
        self._print(f"retrying {run.title} in {format_duration(delay_s)}: {ending.message}")

    def notice(self, text: str) -> None:
        self._print(text)

    def _print(self, what: str | Text) -> None:
        self._console.print(Text.assemble((time.strftime("%H:%M:%S "), "dim"), what), soft_wrap=True)


class LiveView(EventLines):
    """Event lines, and below them the campaign as `status --watch` shows it."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._watcher: Watcher | None = None
        self._glyphs = glyphs_for(console)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="live view", daemon=True)

    def __enter__(self) -> LiveView:
        self._live.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._thread.join()
        self._live.stop()

    def begun(self, files: CampaignFiles, runs: Sequence[RunPlan], workers: int) -> None:
        super().begun(files, runs, workers)
        self._watcher = Watcher(files.directory)

    def _refresh(self) -> None:
        interval = RefreshInterval()
        while not self._left.wait(interval.rest_s()):
            with suppress(RecordsError):  # it may be there at the next look
                for campaign in self._watcher.look().campaigns if self._watcher else ():
                    width, height = self._console.size
                    lines = campaign_frame(campaign, width, min(MOST_LINES, height // 2), self._glyphs)
                    self._live.update(Lines(lines), refresh=True)
