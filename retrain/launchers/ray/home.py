"""The directory `ray/` of a campaign: how orchestrator, driver and tasks communicate, wherever they run.

    written by the orchestrator
    terms.json     number of the current driver, cap on workers, resources of a task
    wanted.json    the runs to do, in order, each with a number
    stopped/       RUN.NUMBER.save or .now: that worker must save and exit, or end; the driver writes it too
    written by the driver
    events.jsonl   what happened to the runs
    written by tasks
    began/         RUN.NUMBER.LIFE: a task is about to start the worker; names its node

A resubmitted run gets a higher number; the driver counts its lives under a number. A task writes its file in
`began/` before it checks whether its run was stopped. So if a stopped run has no such file, no worker starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from retrain.errors import RecordsError
from retrain.records.files import make_directory, read_json, write_json
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.lines import append_line, parse_line, read_lines

GIVEN, LOST, OVER = "given", "lost", "over"  # to Ray; by Ray; as the worker recorded


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms that a driver follows."""

    driver: int = 0  # number of the driver in charge; 0: none yet
    workers: int = 0  # maximum at a time
    options: Mapping[str, Any] = field(default_factory=dict)  # of a task, as `ray.remote` takes them


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """What happened to a run."""

    run_id: str
    number: int
    life: int = 1
    what: str = GIVEN
    driver: int = 0  # number of the driver that wrote it
    exit_code: int | None = None  # of its worker; None if no worker ran, or Ray killed it
    why: str = ""  # Ray's reason, if the worker recorded none

    @property
    def name(self) -> str:
        return f"{self.run_id}.{self.number}.{self.life}"


class Home:
    """The files, and the last event of each run, which the orchestrator updates with `read_events`.

    Methods raise RecordsError if a file cannot be read or written.
    """

    def __init__(self, campaign: Path) -> None:
        self.campaign = campaign
        self.directory = campaign / "ray"
        self.script = self.directory / "job.sh"
        self.lock = self.directory / "local.lock"  # of a driver that starts its own Ray
        self.output = self.directory / "local.out"  # its
        self.last: dict[str, TaskEvent] = {}
        self._lines = 0  # of events.jsonl that were read
        self._events = self.directory / "events.jsonl"
        self._began = self.directory / "began"
        self._stopped = self.directory / "stopped"
        self._terms = self.directory / "terms.json"
        self._wanted = self.directory / "wanted.json"

    def prepare(self) -> None:
        for directory in (self.directory, self._began, self._stopped):
            make_directory(directory)

    def write_terms(self, terms: Terms) -> None:
        """Put a driver in charge: a driver with another number exits, and so do its workers."""
        write_json(self._terms, asdict(terms))

    def terms(self) -> Terms:
        found = self._read(self._terms)
        return Terms(**{name: found[name] for name in Terms.__slots__ if name in found})

    def want(self, numbers: Mapping[str, int]) -> None:
        """Write the wanted runs in the order in which they start, each with its number."""
        if self.directory.is_dir():
            write_json(self._wanted, {"runs": dict(numbers)})

    def wanted(self) -> dict[str, int]:
        runs = self._read(self._wanted).get("runs", {})
        if not isinstance(runs, dict) or not all(isinstance(number, int) for number in runs.values()):
            raise RecordsError(
                f"{self._wanted}: is damaged; `retrain resume {self.campaign}` writes it again"
            )
        return runs

    def _read(self, path: Path) -> dict[str, Any]:
        return (read_json(path) if self.directory.is_dir() else None) or {}

    def stop(self, run_id: str, number: int, *, now: bool) -> None:
        """Ask a worker to save and exit, or to end at once; a worker that has not begun never starts."""
        with suppress(FileNotFoundError):  # no directory: no driver was ever submitted
            (self._stopped / f"{run_id}.{number}.{'now' if now else 'save'}").touch()

    def is_stopped(self, run_id: str, number: int) -> bool:
        """Whether a run was ever stopped under a number, which must then not be used again."""
        return any((self._stopped / f"{run_id}.{number}.{how}").exists() for how in ("save", "now"))

    def has_begun(self, event: TaskEvent) -> bool:
        """Whether a task of this life was about to start the worker, or did."""
        return (self._began / event.name).exists()

    def run(self, run_id: str) -> RunFiles:
        return CampaignFiles(self.campaign).existing_run(run_id)

    def task_arguments(self, event: TaskEvent) -> tuple[str, ...]:
        stop = str(self._stopped / f"{event.run_id}.{event.number}")
        began, run = str(self._began / event.name), str(self.run(event.run_id).directory)
        return str(self.script), run, began, stop, str(self._terms), str(event.driver)

    def read_events(self) -> None:
        """Read the events written since the last call."""
        lines = list(read_lines(self._events))
        for number, line in enumerate(lines[self._lines :], start=self._lines + 1):
            row = parse_line(line)
            if row is not None:  # the last line may be incomplete
                event = TaskEvent(**row)
                self.last[event.run_id], self._lines = event, number

    def write_event(self, event: TaskEvent) -> None:
        """Append an event; only the driver does."""
        append_line(self._events, asdict(event), durable=False)
        self.last[event.run_id] = event

    def event(self, run_id: str, number: int) -> TaskEvent | None:
        """Return the last event of a run under a number; None if no driver has written any."""
        found = self.last.get(run_id)
        return found if found is not None and found.number == number else None

    def has_worked(self, driver: int) -> bool:
        """Whether a driver has written an event that is the last of a run."""
        return any(event.driver == driver for event in self.last.values())
