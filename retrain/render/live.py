"""A campaign as it runs: bars on a terminal, plain lines elsewhere. All of it on standard error."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from retrain.campaign import Observer
from retrain.campaign.endings import Ending
from retrain.errors import RecordsError
from retrain.plan.matrix import RunPlan
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.lines import Row
from retrain.records.metrics import read_ends
from retrain.records.run_state import RunState
from retrain.records.text import count_of, format_duration
from retrain.render.tables import BAD, STYLES, number

REFRESH_S = 0.5


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
    """Event lines above a bar for the campaign and one for each active run."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            transient=True,
        )
        self._files: CampaignFiles | None = None
        self._campaign: TaskID | None = None
        self._active: dict[str, tuple[TaskID, RunPlan]] = {}
        self._steps: dict[str, int] = {}
        self._changing = threading.Lock()  # bars: the supervisor's thread takes them away, ours fills them
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="live view", daemon=True)

    def __enter__(self) -> LiveView:
        self.bars.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self._thread.join()
        self.bars.stop()

    def begun(self, files: CampaignFiles, runs: Sequence[RunPlan], workers: int) -> None:
        super().begun(files, runs, workers)
        self._files = files
        self._campaign = self.bars.add_task("campaign", total=sum(run.max_steps for run in runs), note="")

    def started(self, run: RunPlan) -> None:
        super().started(run)
        bar = self.bars.add_task(f"  {run.title}", total=run.max_steps, note="")
        with self._changing:
            self._active[run.run_id] = (bar, run)

    def ended(self, run: RunPlan, ending: Ending, tail: Sequence[str]) -> None:
        self._drop(run, done=ending.state is RunState.DONE)
        super().ended(run, ending, tail)

    def retrying(self, run: RunPlan, ending: Ending, delay_s: float) -> None:
        self._drop(run, done=False)
        super().retrying(run, ending, delay_s)

    def look(self) -> None:
        """Bring the bars up to date with what the runs have written."""
        if self._files is None:
            return
        with self._changing:
            active = list(self._active.values())
        for bar, run in active:
            inside = self._files.run(run.run_id)
            files = inside if inside.directory.exists() else RunFiles(self._files.directory)
            with suppress(RecordsError):
                for row in read_ends(files.metrics, 1, ("mean_reward",)).last:
                    self._show_step(bar, run, row)
        self._count()

    def _refresh(self) -> None:
        while not self._left.wait(REFRESH_S):
            self.look()

    def _show_step(self, bar: TaskID, run: RunPlan, row: Row) -> None:
        with self._changing:
            if self._active.get(run.run_id) == (bar, run):  # it may have ended while the row was read
                self._steps[run.run_id] = row["step"]
                note = f"reward {number(row.get('mean_reward'), 2)}"
                self.bars.update(bar, completed=row["step"], note=note)

    def _drop(self, run: RunPlan, *, done: bool) -> None:
        with self._changing:
            active = self._active.pop(run.run_id, None)
            if active is not None:
                self.bars.remove_task(active[0])
            if done:
                self._steps[run.run_id] = run.max_steps
        self._count()

    def _count(self) -> None:
        if self._campaign is not None:
            with self._changing:
                self.bars.update(self._campaign, completed=sum(self._steps.values()))
