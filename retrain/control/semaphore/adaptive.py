"""One number of permits for all workers of a campaign, adapted to what the API sustains.

The controller's state is stored with the permits, in `adaptive.json`: a worker that finished a call takes a
lock, continues from that state and sets the semaphore's permits. Every change is a line of
`adaptive.jsonl`. Nothing is lost when a worker dies: the kernel frees the lock, and the file is complete.

Times are those of the file system, which all callers share: a monotonic clock starts at each machine's boot.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from retrain.base.clock import utc_now
from retrain.base.errors import RecordsError, records_error
from retrain.base.locks import locked
from retrain.control.rules.concurrency_limit import CallFacts, ConcurrencyLimit
from retrain.control.semaphore import FileSemaphore
from retrain.records.files import read_json, record_of, remove_leftovers, write_json
from retrain.records.lines import append_line, read_records

STATE, LOCK, CHANGES = "adaptive.json", "adaptive.lock", "adaptive.jsonl"
LONGEST_S = 1.0  # that a call's result waits for the lock: another worker may be stopped with it
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PermitChange:
    """One line of `adaptive.jsonl`."""

    at: str
    before: int
    permits: int
    reason: str
    run: str  # the run whose call caused it


@dataclass(frozen=True)
class SharedLimit:
    """A worker's view of its campaign's adaptive permits."""

    directory: Path  # of the semaphore
    semaphore: FileSemaphore
    run_name: str  # recorded with each change that we cause

    def observe(self, call: CallFacts) -> None:
        """Update the number of permits from a finished call; raise RecordsError if it cannot be written."""
        path = self.directory / LOCK
        try:
            with locked(path, LONGEST_S):
                self._observe(call, path.stat().st_mtime)  # when the lock was taken
        except OSError as error:
            raise records_error(path, "lock", error) from error

    def _observe(self, call: CallFacts, now_s: float) -> None:
        before = self.semaphore.permits
        limit = ConcurrencyLimit(before)
        with suppress(RecordsError, ValueError):  # damaged: start over
            if (state := read_json(self.directory / STATE)) is not None:
                limit = record_of(ConcurrencyLimit, state)
        decision = limit.observe(now_s, call)
        write_json(self.directory / STATE, asdict(limit), durable=False)
        if decision.permits != before:  # changed, or reset by a restarted campaign
            self.semaphore.set_permits(decision.permits)
            change = PermitChange(utc_now(), before, decision.permits, decision.reason, self.run_name)
            append_line(self.directory / CHANGES, asdict(change), durable=False)
            log.warning("permits: %d -> %d, because %s", before, decision.permits, decision.reason)


def remove_leftover_states(directory: Path) -> None:
    """Remove what workers left that were killed while they wrote the state; not if the lock cannot be had."""
    with suppress(OSError, RecordsError), locked(directory / LOCK, LONGEST_S):
        remove_leftovers(directory, STATE)


def last_change(directory: Path) -> PermitChange | None:
    """Return the last change of a directory's permits; None if they were never adapted."""
    changes = read_records(directory / CHANGES, PermitChange)
    return changes[-1] if changes else None
