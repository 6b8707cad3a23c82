"""notices.jsonl: an orchestrator's notices about its campaign as a whole, for later readers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from retrain.clock import utc_now
from retrain.records.lines import append_line, parse_line


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
    row = parse_line(line) or {}
    text = row.get("text")
    return Notice(str(row.get("at", "")), text) if isinstance(text, str) else None
