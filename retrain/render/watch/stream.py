"""The live view for programs and pipes: a line for each thing that changed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console

from retrain.errors import EXIT_DONE, EXIT_INTERRUPTED
from retrain.render.status import show_all, time_left
from retrain.render.tables import JSON_VERSION, plain_value
from retrain.render.watch.frame import event_line
from retrain.render.watch.screen import Asked, Inbox, RefreshInterval
from retrain.status.survey import CampaignStatus
from retrain.status.watch import View, Watcher

PROGRESS_EVERY = 0.1  # of a campaign's steps: a line for each tenth


class JsonLines:
    """An object a line: `kind` is campaign, run or event; at first everything, then what changed."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, str], object] = {}

    def show(self, view: View) -> None:
        for line in self.changes(view):
            print(json.dumps(line))

    def changes(self, view: View) -> Iterator[dict[str, Any]]:
        """Iterate over what changed since the last call."""
        for watched in view.campaigns:
            name = watched.status.id
            for run_id, run in watched.runs.items():
                if self._is_news((name, run_id), run):
                    rewards = {"rewards": plain_value(run.rewards)}
                    yield {"kind": "run", "campaign": name} | plain_value(run.row) | rewards
            if self._is_news((name, ""), watched.status):
                row = plain_value(watched.status)
                del row["runs"]
                yield {"kind": "campaign", "version": JSON_VERSION} | row
        for added in view.added:
            said = plain_value(added)
            yield {"kind": "event", "event": said.pop("kind")} | said

    def _is_news(self, key: tuple[str, str], value: object) -> bool:
        before, self._said[key] = self._said.get(key), value
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
        tenths = {status.id: _tenth(status) for status in statuses}
        if self._tenths is not None:
            for added in view.added:
                self._console.print(event_line(added, several=len(statuses) > 1), soft_wrap=True)
            for status in statuses:
                if tenths[status.id] > self._tenths.get(status.id, 0):
                    self._console.print(_progress(status), soft_wrap=True)
        elif statuses:
            show_all(statuses, self._console)
        else:
            self._console.print(f"{self._log_dir}: no campaigns yet", soft_wrap=True)
        self._tenths = tenths


def watch_as_lines(log_dir: Path, show: Callable[[View], None]) -> int:
    """Print changes until all runs have ended; return the exit code: 0, or 130 after Ctrl-C or a signal.

    Raises:
        RecordsError: there is no such directory.
    """
    watcher, interval = Watcher(log_dir), RefreshInterval()
    with closing(Inbox(has_screen=False)) as inbox:
        while True:
            view = watcher.look()
            show(view)
            sys.stdout.flush()
            if view.campaigns and not any(c.status.state == "running" for c in view.campaigns):
                return EXIT_DONE
            if inbox.wait(interval.rest_s()) in (Asked.STOP, Asked.QUIT):
                return EXIT_INTERRUPTED


def _tenth(status: CampaignStatus) -> int:
    return int(status.steps_done / status.steps_total / PROGRESS_EVERY) if status.steps_total else 0


def _progress(status: CampaignStatus) -> str:
    said = f"{status.id}: {status.state}, {status.steps_done}/{status.steps_total} steps"
    return f"{said}, {time_left(status)}" if status.eta_s is not None else said
