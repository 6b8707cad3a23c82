"""alerts.jsonl: what a campaign has alerted of, and which way took it. Only the lock's holder writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from retrain.records.files import record_of
from retrain.records.lines import append_line, parse_line, read_lines
from retrain.records.text import plain

VERSION = 1  # of what a command or an address gets


@dataclass(frozen=True)
class Alert:
    """Something that happened in a campaign, as a command or an address gets it in JSON."""

    version: int
    key: str  # the same for the same event, also after a resume
    kind: str  # failed, stalled, no_signal, paused, verdict, budget, mirror or ended
    campaign: str
    directory: str  # absolute
    host: str
    at: str  # UTC
    run: str  # its name, or several; "" for the campaign
    condition: str
    what: str
    exit_code: int | None = None  # of the campaign, once it has ended


class AlertBook:
    """The alerts of a campaign, and how they were delivered."""

    def __init__(self, path: Path) -> None:
        """Read what there is; RecordsError if it cannot be read."""
        self._path = path
        self.alerts: dict[str, Alert] = {}  # by key
        self._outcomes: dict[tuple[str, str], str] = {}  # by key and way: a problem; "" if delivered
        if not path.exists():
            return
        for line in read_lines(path):
            row = parse_line(line) or {}
            try:
                if "way" in row:
                    self._outcomes[str(row["key"]), str(row["way"])] = str(row["problem"])
                elif row:
                    self.alerts[str(row["key"])] = record_of(Alert, row)
            except (KeyError, ValueError):  # another version's
                continue

    def add(self, alert: Alert) -> None:
        self.alerts[alert.key] = alert
        append_line(self._path, asdict(alert))

    def note(self, key: str, way: str, problem: str) -> None:
        """Note that a way has taken an alert, or with which problem it has not."""
        self._outcomes[key, way] = problem
        append_line(self._path, {"key": key, "way": way, "problem": problem})

    def undelivered(self, way: str) -> Sequence[Alert]:
        """Return what a way has not taken, the oldest first."""
        return [alert for key, alert in self.alerts.items() if self._outcomes.get((key, way)) != ""]

    def problem(self) -> str:
        """Return how many alerts a way refused, and the last reason; "" if none."""
        refused = [(key, way, why) for (key, way), why in self._outcomes.items() if why]
        if not refused:
            return ""
        _, way, why = refused[-1]
        return plain(f"{len(refused)} of {len(self.alerts)} not delivered; {way}: {why}", 500)
