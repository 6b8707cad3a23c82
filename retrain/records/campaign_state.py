"""stop.json and notices.jsonl: a request to stop a campaign, and its orchestrator's notices.

A request is valid until the next orchestrator starts. It needs no process id and reaches other machines that
share the directory. The orchestrator checks for it, and so does every worker, at its start and while it runs:
otherwise a worker whose orchestrator or cluster is gone would not stop.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from retrain.base.clock import utc_now
from retrain.base.errors import RecordsError
from retrain.records.files import read_json, readable, record_of, write_json
from retrain.records.layout import CampaignFiles
from retrain.records.lines import append_line, parse_line
from retrain.records.text import plain


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
    """Write notices; only for the holder of the campaign's lock."""

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
