"""stop.json, notices.jsonl and alerts.jsonl: a request to stop, notices, and what was alerted of.

A request is valid until the next orchestrator starts. It needs no process id and reaches other machines that
share the directory. The orchestrator checks for it, and so does every worker, at its start and while it runs:
otherwise a worker whose orchestrator or cluster is gone would not stop. Notices and alerts are written by the
orchestrator, which holds the campaign's lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from retrain.base.clock import utc_now
from retrain.base.errors import RecordsError
from retrain.records.files import read_json, readable, record_of, write_json
from retrain.records.layout import CampaignFiles
from retrain.records.lines import append_line, parse_line, read_lines
from retrain.records.text import plain

ALERT_VERSION = 1  # of what a command or an address gets


def ask_to_stop(files: CampaignFiles, *, now: bool, why: str = "") -> None:
    """Ask a campaign's orchestrator and workers to save and exit, or (`now`) to exit at once."""
    write_json(files.stop_request, {"now": now} | ({"why": why} if why else {}))


def why_stopped(files: CampaignFiles) -> str:
    """Return why a campaign asked itself to stop; "" if it was somebody else, or it did not."""
    return plain(str((readable(read_json, files.stop_request) or {}).get("why", "")))


def asked_to_stop(files: CampaignFiles) -> int:
    """Return the request: 0 for none, 1 to save and exit, 2 to exit now.

    A directory that cannot be read at present (an unavailable file server) counts as no request.
    """
    try:
        request = read_json(files.stop_request) if files.stop_request.exists() else None
    except OSError:
        return 0
    except RecordsError:  # there is a request, which cannot be read
        return 1
    if request is None:  # none, or a resume removed it between the two looks
        return 0
    return 2 if request.get("now") is True else 1


@dataclass(frozen=True, slots=True)
class Notice:
    """One notice; the text is as written, not made safe to print."""

    at: str
    text: str


class NoticeBook:
    """Writes notices."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._about = ""

    def write(self, text: str) -> None:
        """Add a notice, unless it differs from the last one only in the figures after its colon."""
        about = text.partition(":")[0]
        if about == self._about:
            return
        self._about = about
        append_line(self._path, {"at": utc_now(), "text": text})


def parse_notice(line: bytes) -> Notice | None:
    """Parse one line; None if it is not a notice."""
    with suppress(ValueError):
        return record_of(Notice, parse_line(line) or {})
    return None


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
