"""The files through which orchestrator, driver and tasks communicate; the package's docstring says how."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from retrain.base.errors import RecordsError, records_error
from retrain.records.files import make_directory, read_json, write_json
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.lines import append_line, parse_line, read_lines

GIVEN, LOST, OVER = "given", "lost", "over"  # to Ray; by Ray; as the worker recorded


@dataclass(frozen=True, slots=True)
class Orders:
    """What the driver does; it reads them every second."""

    driver: int = 0  # number of the driver in charge, 0: none yet; any other submits no more tasks
    workers: int = 0  # maximum at a time
    options: Mapping[str, Any] = field(default_factory=dict)  # of a task, as `ray.remote` takes them
    serial: int = 0  # number of the last submission
    runs: Mapping[str, int] = field(default_factory=dict)  # to do, in order, by the number of its submission
    stop: Mapping[str, int] = field(default_factory=dict)  # of these: 1 save and exit, 2 end at once


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
        self._stopped = self.directory / "stopped"
        self._orders = self.directory / "orders.json"

    def prepare(self) -> None:
        make_directory(self._stopped)

    def write(self, orders: Orders) -> None:
        write_json(self._orders, asdict(orders))

    def orders(self) -> Orders:
        content = (read_json(self._orders) if self.directory.is_dir() else None) or {}
        try:
            return Orders(**content)
        except TypeError as error:
            again = f"`retrain resume {self.campaign}` writes it again"
            raise RecordsError(f"{self._orders}: is damaged; remove it, and {again}") from error

    def stop(self, event: TaskEvent, *, now: bool) -> None:
        """Ask a worker to save and exit, or to end at once; one that has not begun never starts."""
        path = self._stopped / f"{event.name}.{'now' if now else 'save'}"
        try:
            with suppress(FileNotFoundError):  # the directory was removed
                path.touch()
        except OSError as error:
            raise records_error(path, "write", error) from error

    def task_arguments(self, event: TaskEvent) -> tuple[str, ...]:
        return str(self.script), str(self.run(event.run_id).directory), str(self._stopped / event.name)

    def run(self, run_id: str) -> RunFiles:
        return CampaignFiles(self.campaign).existing_run(run_id)

    def read_events(self) -> None:
        """Read the events written since the last call."""
        lines = list(read_lines(self._events))
        for number, line in enumerate(lines[self._lines :], start=self._lines + 1):
            with suppress(TypeError):  # the last line may be incomplete, another damaged
                event = TaskEvent(**(parse_line(line) or {}))
                self.last[event.run_id], self._lines = event, number

    def write_event(self, event: TaskEvent) -> None:
        """Append an event; only the driver does."""
        append_line(self._events, asdict(event), durable=False)
        self.last[event.run_id] = event

    def event(self, run_id: str, number: int) -> TaskEvent | None:
        """Return the last event of a run under a number; None if no driver has written any."""
        event = self.last.get(run_id)
        return event if event is not None and event.number == number else None
