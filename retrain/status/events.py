"""Events of a run, derived from its attempts and metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from retrain.records.attempts import Attempt
from retrain.records.lines import Row
from retrain.records.run_state import Progress, RunState
from retrain.records.text import plain

ROW_KEYS = ("timestamp", "throttle_level", "throttle_reason", "bp_action", "bp_batch_size", "bp_reason")
_CALM = ("", "done", "interrupted")


@dataclass(frozen=True, slots=True)
class Event:
    """One event; its text is safe to print."""

    at: str  # UTC, as the records say it; "" if they do not
    run_id: str  # "" if it is about the campaign as a whole
    kind: str  # started, retried, resumed, throttle, batch, paused, notice, or an attempt's ending
    text: str  # the reason, or what it went to


def of_attempts(run_id: str, before: Sequence[Attempt], now: Sequence[Attempt]) -> Iterator[Event]:
    """Iterate over starts, retries and endings that are in `now` and were not in `before`."""
    known = {attempt.number: attempt for attempt in before}
    previous = ""
    for attempt in now:
        was = known.get(attempt.number)
        if was is None:
            yield _begun(run_id, attempt, previous)
        if attempt.ending is not None and (was is None or was.ending is None):
            yield Event(plain(attempt.ended_at or ""), run_id, plain(attempt.ending, 20), _reason(attempt))
        previous = attempt.ending or RunState.DIED


def of_death(run_id: str, attempt: Attempt, progress: Progress | None, message: str) -> Event:
    """Return the end of an attempt that recorded none, at the time of its last sign of life."""
    at = progress.updated_at if progress and progress.attempt == attempt.number else attempt.started_at
    return Event(plain(at), run_id, RunState.DIED, plain(message) or "killed without a message")


def of_rows(run_id: str, before: Row | None, rows: Sequence[Row]) -> Iterator[Event]:
    """Iterate over changes of the throttle's level and of back pressure's batch size."""
    for row in rows:
        at = plain(str(row.get("timestamp", "")))
        was, level = (before or {}).get("throttle_level"), row.get("throttle_level")
        if level != was and (before is not None or level != "full") and level is not None:
            text = f"{was or 'full'} -> {level}: {row.get('throttle_reason', '')}"
            yield Event(at, run_id, "throttle", plain(text))
        if row.get("bp_action") in ("throttle", "increase"):
            text = f"{row['bp_action']} to {row.get('bp_batch_size')}: {row.get('bp_reason', '')}"
            yield Event(at, run_id, "batch", plain(text))
        before = row


def _begun(run_id: str, attempt: Attempt, previous: str) -> Event:
    at, step = plain(attempt.started_at), attempt.resumed_from_step
    if attempt.number == 1:
        return Event(at, run_id, "started", "")
    kind = "resumed" if previous in _CALM else "retried"
    return Event(at, run_id, kind, f"attempt {attempt.number}, from step {step}")


def _reason(attempt: Attempt) -> str:
    if attempt.ending == RunState.DONE:
        return ""
    lines = attempt.message.strip().splitlines()
    return plain(lines[-1]) if lines else ""
