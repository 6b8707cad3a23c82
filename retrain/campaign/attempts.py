"""How often a run was tried under this orchestrator, counted from the run's own files.

An engine may start a task twice, and a task that finds its run taken leaves without a trace: what
counts is what begun attempts wrote down, and launches after which nothing had been written at all.
"""

from __future__ import annotations

from collections import Counter

from retrain.errors import RecordsError
from retrain.records.attempts import read_attempts
from retrain.records.layout import RunFiles
from retrain.records.run_state import RunState, read_progress


class AttemptCounter:
    """The count for each run."""

    def __init__(self) -> None:
        self._first: dict[str, int] = {}  # newest attempt before this orchestrator did anything
        self._launched_at: dict[str, int] = {}  # newest attempt when it was launched last
        self._traceless: Counter[str] = Counter()
        self._granted: Counter[str] = Counter()

    def launched(self, run_id: str, files: RunFiles) -> None:
        """A worker was launched, or found alive.

        Raises:
            RecordsError: the run's attempts cannot be read.
        """
        newest = _newest(files)
        self._first.setdefault(run_id, newest)
        self._launched_at[run_id] = newest

    def ended(self, run_id: str, files: RunFiles) -> int:
        """Count this end, and give how many tries there were."""
        try:
            newest = _newest(files)
        except RecordsError:
            newest = self._launched_at.get(run_id, 0)
        if newest <= self._launched_at.get(run_id, 0):
            self._traceless[run_id] += 1
        begun = newest - self._first.get(run_id, newest)
        return begun + self._traceless[run_id] - self._granted[run_id]

    def grant(self, run_id: str, state: RunState, files: RunFiles) -> bool:
        """Do not count an attempt that the engine cut short after it had saved some progress.

        There are at most as many of those as the run has steps.
        """
        try:
            attempts, progress = read_attempts(files.attempts), read_progress(files.status)
        except RecordsError:
            return False
        if state is not RunState.INTERRUPTED or not attempts or progress is None:
            return False
        if progress.attempt != attempts[-1].number or progress.step <= attempts[-1].resumed_from_step:
            return False
        self._granted[run_id] += 1
        return True


def _newest(files: RunFiles) -> int:
    return max((attempt.number for attempt in read_attempts(files.attempts)), default=0)
