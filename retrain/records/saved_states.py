"""states.jsonl: the states that a run has saved at an API, and those of them that were deleted again."""

from __future__ import annotations

from collections.abc import Iterable

from retrain.clock import utc_now
from retrain.records.layout import RunFiles
from retrain.records.lines import append_line, parse_line, read_lines


def note_saved(files: RunFiles, path: str) -> None:
    """Note that a state was saved."""
    append_line(files.states, {"saved": path, "at": utc_now()})


def note_deleted(files: RunFiles, paths: Iterable[str]) -> None:
    """Note that states were deleted."""
    for path in paths:
        append_line(files.states, {"deleted": path, "at": utc_now()})


def saved_states(files: RunFiles) -> tuple[str, ...]:
    """Return the paths of the states that were saved and not deleted, the oldest first."""
    rows = [row for line in read_lines(files.states) if (row := parse_line(line)) is not None]
    found: dict[str, None] = {}
    for row in rows:
        if isinstance(path := row.get("saved"), str):
            found[path] = None
        elif isinstance(path := row.get("deleted"), str):
            found.pop(path, None)
    return tuple(found)
