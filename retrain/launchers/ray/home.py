"""The directory `ray/` of a campaign: how orchestrator, driver and tasks speak, wherever each of them runs.

    written by the orchestrator
    terms.json     who is the driver, how many workers at a time, what a task asks for
    wanted.json    which runs are to be done, in order, each with a number
    stopped/       RUN.NUMBER.save or .now: that worker is to save and leave, or end; the driver writes it too
    written by the driver
    events.jsonl   what became of the runs
    written by tasks
    began/         RUN.NUMBER.LIFE: a task is about to start the worker; names its node

A run that is wanted again gets a higher number; the driver counts its lives under a number. A task writes
that it began before it looks whether its run was stopped, so whoever stops a run knows that no worker starts
if there is no such file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from retrain.errors import RecordsError
from retrain.records.atomic import read_json, write_json
from retrain.records.files import make_directory
from retrain.records.layout import CampaignFiles, RunFiles, is_single_run
from retrain.records.lines import LineAppender, dump_line, parse_line, read_lines

GIVEN, LOST, OVER = "given", "lost", "over"  # to Ray; by Ray; in the worker's own words


@dataclass(frozen=True, slots=True)
class Terms:
    """What a driver keeps to."""

    driver: int = 0  # the one that is in charge, by number; 0: none yet
    workers: int = 0  # at most so many at a time
    options: Mapping[str, Any] = field(default_factory=dict)  # of a task, as `ray.remote` takes them


@dataclass(frozen=True, slots=True)
class Event:
    """What became of a run."""

    run_id: str
    number: int
    life: int
    what: str  # GIVEN, LOST, OVER
    driver: int  # who says so
    exit_code: int | None = None  # of its worker; None if it had none, or Ray took it
    why: str = ""  # in Ray's words, if the worker did not decide it

    @property
    def name(self) -> str:
        """Name this life of the run."""
        return f"{self.run_id}.{self.number}.{self.life}"


class Home:
    """The files."""

    def __init__(self, campaign: Path) -> None:
        self.campaign = campaign
        self.directory = campaign / "ray"
        self.script = self.directory / "job.sh"
        self.events = self.directory / "events.jsonl"
        self.lock = self.directory / "local.lock"  # of a driver that has a Ray of its own
        self.output = self.directory / "local.out"  # its
        self._began = self.directory / "began"
        self._stopped = self.directory / "stopped"
        self._terms = self.directory / "terms.json"
        self._wanted = self.directory / "wanted.json"

    def prepare(self) -> None:
        """Make the directories."""
        for directory in (self.directory, self._began, self._stopped):
            make_directory(directory)

    def write_terms(self, terms: Terms) -> None:
        """Put a driver in charge: one with another number leaves, and its workers too."""
        write_json(self._terms, asdict(terms))

    def terms(self) -> Terms:
        """Return what a driver keeps to.

        Raises:
            RecordsError: the file cannot be read.
        """
        found = (read_json(self._terms) if self.directory.is_dir() else None) or {}
        return Terms(**{name: found[name] for name in Terms.__slots__ if name in found})

    def want(self, numbers: Mapping[str, int]) -> None:
        """Write which runs are wanted, in the order in which they are to start, each with its number."""
        if self.directory.is_dir():
            write_json(self._wanted, {"runs": dict(numbers)})

    def wanted(self) -> dict[str, int]:
        """Return the wanted runs and their numbers.

        Raises:
            RecordsError: the file cannot be read.
        """
        found = read_json(self._wanted) if self.directory.is_dir() else None
        runs = (found or {}).get("runs", {})
        if not isinstance(runs, dict) or not all(isinstance(number, int) for number in runs.values()):
            raise RecordsError(
                f"{self._wanted}: is damaged; `retrain resume {self.campaign}` writes it again"
            )
        return dict(runs)

    def stop(self, run_id: str, number: int, *, now: bool) -> None:
        """Have a worker save and leave, or end at once; one that has not begun never starts."""
        with suppress(FileNotFoundError):  # no directory: nothing was ever given to a driver
            (self._stopped / f"{run_id}.{number}.{'now' if now else 'save'}").touch()

    def is_stopped(self, run_id: str, number: int) -> bool:
        """Whether a run was ever stopped under a number, which then is of no use any more."""
        return any((self._stopped / f"{run_id}.{number}.{how}").exists() for how in ("save", "now"))

    def has_begun(self, name: str) -> bool:
        """Whether a task of this life was about to start the worker, or did."""
        return (self._began / name).exists()

    def run(self, run_id: str) -> RunFiles:
        """Return a run's files."""
        alone = is_single_run(self.campaign)
        return RunFiles(self.campaign) if alone else CampaignFiles(self.campaign).run(run_id)

    def run_ids(self) -> list[str]:
        """List all runs that have a directory."""
        runs = CampaignFiles(self.campaign).runs
        return sorted(os.listdir(runs)) if runs.is_dir() else []  # noqa: PTH208 - names are all it takes

    def task_arguments(self, event: Event) -> tuple[str, ...]:
        """Return what `task.work` is called with."""
        stop = str(self._stopped / f"{event.run_id}.{event.number}")
        began, run = str(self._began / event.name), str(self.run(event.run_id).directory)
        return str(self.script), run, began, stop, str(self._terms), str(event.driver)


class Ledger:
    """What became of each run last, read from the events; only what is new is looked at again."""

    def __init__(self, home: Home) -> None:
        self._path = home.events
        self._lines = 0
        self.last: dict[str, Event] = {}
        self.driver = 0  # the last that wrote anything

    def read(self) -> None:
        """Read what was written since.

        Raises:
            RecordsError: the file cannot be read.
        """
        lines = list(read_lines(self._path))
        for number, line in enumerate(lines[self._lines :], start=self._lines + 1):
            row = parse_line(line)
            if row is not None:  # the last one may not be whole yet
                self._note(Event(**row))
                self._lines = number

    def write(self, event: Event) -> None:
        """Add an event, as the only writer.

        Raises:
            RecordsError: the disk refuses.
        """
        with closing(LineAppender(self._path)) as lines:
            lines.append(dump_line(asdict(event)))
        self._note(event)

    def of(self, run_id: str, number: int) -> Event | None:
        """Return what became of a run under a number; None if no driver has said anything."""
        found = self.last.get(run_id)
        return found if found is not None and found.number == number else None

    def number(self, run_id: str) -> int:
        """Return a run's newest number; 0 if it has none."""
        return self.last[run_id].number if run_id in self.last else 0

    def _note(self, event: Event) -> None:
        self.last[event.run_id] = event
        self.driver = max(self.driver, event.driver)
