"""A campaign as it runs: event lines, on a terminal with its view below, elsewhere with lines of steps.

All of it is written to standard error.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from retrain.base.errors import ConfigError, RecordsError
from retrain.campaign import Observer
from retrain.campaign.endings import Ending
from retrain.cli.render.frame import campaign_frame
from retrain.cli.render.status import doing
from retrain.cli.render.tables import BAD, STYLES
from retrain.cli.render.watch import Lines, RefreshInterval
from retrain.plan.matrix import RunPlan
from retrain.records.layout import CampaignFiles
from retrain.records.run_state import WAITING, RunState, rung_of
from retrain.records.text import count_of, format_duration, number
from retrain.results.status.watch import WatchedCampaign, Watcher

MOST_LINES = 20  # of the view; at most half of the screen
SHORTEST_S, LONGEST_S = 10.0, 60.0  # between two lines of a run; longer if many run


class EventLines(Observer):
    """Prints a line for each event; after a failure, the last lines of the run's output."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started: dict[str, float] = {}
        self._done = 0
        self._total = 0

    def begun(self, files: CampaignFiles, runs: Sequence[RunPlan], workers: int) -> None:
        self._total = len(runs)
        what = f"{count_of(len(runs), 'run')}, {workers} at a time" if runs else "no run to start"
        self._print(f"{what}, records in {files.directory}")

    def asked(self, runs: Sequence[RunPlan]) -> None:
        self._total += len(runs)

    def started(self, run: RunPlan) -> None:
        self._started[run.run_id] = time.monotonic()
        self._print(f"started {run.title}")

    def ended(self, run: RunPlan, ending: Ending, tail: Sequence[str]) -> None:
        self._done += 1
        started = self._started.get(run.run_id)
        took_s = ending.took_s  # not measured here, because a cluster is polled only now and then
        if took_s is None and started is not None:
            took_s = time.monotonic() - started
        took = f" after {format_duration(took_s)}" if took_s is not None else ""
        what = f" {run.title}{took} ({self._done} of {self._total})"
        message = f": {ending.message}" if ending.message else ""
        state = WAITING if rung_of(ending.message) else ending.state.value
        self._print(Text.assemble((state, STYLES.get(state, BAD)), what, message))
        for line in tail:
            self._console.print(f"    {line}", style="dim", soft_wrap=True)

    def retrying(self, run: RunPlan, ending: Ending, delay_s: float) -> None:
        why = ending.message or ending.state
        if ending.state == RunState.STALLED and ending.message:  # which says how it ended, not why
            why = f"stalled; {ending.message}"
        self._print(f"retrying {run.title} in {format_duration(delay_s)}: {why}")

    def notice(self, text: str) -> None:
        self._print(text)

    def _print(self, what: str | Text) -> None:
        self._console.print(Text.assemble((time.strftime("%H:%M:%S "), "dim"), what), soft_wrap=True)


class RecordsFollower(EventLines):
    """Event lines, while a thread follows the campaign's records."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._directory: Path | None = None
        self.watcher: Watcher | None = None  # None until something runs
        self._notices: SimpleQueue[str | None] = SimpleQueue()  # the end is None
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._notices.put(None)
        self._thread.join()

    def begun(self, files: CampaignFiles, runs: Sequence[RunPlan], workers: int) -> None:
        super().begun(files, runs, workers)
        self._directory = files.directory
        self._follow_if_any(runs)

    def asked(self, runs: Sequence[RunPlan]) -> None:
        super().asked(runs)
        self._follow_if_any(runs)

    def _follow_if_any(self, runs: Sequence[RunPlan]) -> None:
        """Read the records from now on, unless nothing runs: that takes 1 s per 1,000 finished runs."""
        if runs and self.watcher is None and self._directory is not None:
            self.watcher = Watcher(self._directory)

    def notice_soon(self, text: str) -> None:
        """Have a message printed by the thread: a signal handler must not wait for a lock."""
        self._notices.put(text)

    def _follow(self) -> None:
        interval = RefreshInterval()
        while True:
            with suppress(Empty):
                if (text := self._notices.get(timeout=interval.rest_s())) is None:
                    return
                self.notice(text)
                continue
            with suppress(ConfigError, RecordsError):  # it may be there at the next look
                for campaign in self.watcher.refresh().campaigns if self.watcher else ():
                    self.show(campaign)

    @abstractmethod
    def show(self, campaign: WatchedCampaign) -> None:
        """Show what the records say now."""


class LiveView(RecordsFollower):
    """Event lines, and below them the campaign as `status --watch` shows it."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._live.stop()

    def show(self, campaign: WatchedCampaign) -> None:
        width, height = self._console.size
        lines = campaign_frame(campaign, width, min(MOST_LINES, height // 2))
        self._live.update(Lines(lines), refresh=True)


class StepLines(RecordsFollower):
    """Event lines, and of each run a line per step, or per minute of a longer step."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console)
        self._clock = clock
        self._printed: dict[str, tuple[int, float]] = {}  # each run's steps, and when they were printed

    def show(self, campaign: WatchedCampaign) -> None:
        running = [run.row for run in campaign.runs.values() if run.row.state == RunState.RUNNING]
        now_s, shortest_s = self._clock(), max(SHORTEST_S, len(running))
        for row in running:
            step, printed_s = self._printed.setdefault(row.run_id, (row.step, now_s))
            if now_s - printed_s >= (shortest_s if row.step > step else LONGEST_S):
                self._printed[row.run_id] = row.step, now_s
                parts = [f"{row.name} step {row.step}/{row.max_steps or '?'}"]
                if row.reward_mean is not None:
                    reward = f"reward {number(row.reward_mean, 2)} (last {row.reward_steps})"
                    parts += [reward, f"{format_duration(row.step_time_s)} a step"]
                if row.phase:
                    parts.append(f"now: {doing(row)}")
                self._print(", ".join(parts))
