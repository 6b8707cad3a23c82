"""The records of a running trainer: metrics, samples and progress."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from retrain.errors import NonFiniteError
from retrain.records.layout import RunFiles
from retrain.records.metrics import MetricsWriter
from retrain.records.run_state import Progress, RunState, write_progress
from retrain.records.samples import SamplesWriter
from retrain.records.step_row import StepRow

if TYPE_CHECKING:
    from retrain.trainer.logger_threads import LoggerThreads
    from retrain.trainer.sample_selection import ShownRollout

PROGRESS_EVERY_S = 0.4  # status.json is read by people: twice a second is enough


class Journal:
    """metrics.jsonl, samples.jsonl and status.json of one attempt."""

    def __init__(
        self, files: RunFiles, attempt: int, max_steps: int, loggers: LoggerThreads | None = None
    ) -> None:
        self._loggers = loggers
        self._ending: tuple[str, Mapping[str, Any]] = (RunState.DIED, {})
        self._metrics = MetricsWriter(files.metrics, attempt)
        if loggers is not None:
            loggers.begin()
        self._warmup_file = files.warmup
        self._samples = SamplesWriter(files.samples, attempt)
        self._status = files.status
        self.attempt = attempt
        self._max_steps = max_steps
        self._written_at = -PROGRESS_EVERY_S

    def row(self, row: StepRow) -> None:
        """Write a step's row.

        Raises:
            NonFiniteError: a value is NaN or infinite; names the key.
        """
        try:
            self._metrics.append(row.columns())
        except ValueError as error:
            raise NonFiniteError(f"step {row.identity.step}: {error}") from error
        if self._loggers is not None:
            self._loggers.recorded(row.identity.step)

    def warm_up_writer(self) -> MetricsWriter:
        """Open warmup.jsonl, which has one row per supervised update."""
        return MetricsWriter(self._warmup_file, self.attempt)

    def samples(self, step: int, rows: Sequence[ShownRollout]) -> None:
        """Write the rollouts chosen from a step."""
        self._samples.append(step, [asdict(row) for row in rows])

    def phase(self, phase: str, step: int, *, state: str = RunState.RUNNING, message: str = "") -> None:
        """Write the current phase to status.json, at most every `PROGRESS_EVERY_S` while running."""
        now = time.monotonic()
        if state == RunState.RUNNING and now - self._written_at < PROGRESS_EVERY_S:
            return
        self._written_at = now
        write_progress(
            self._status,
            Progress(state, phase, step, self._max_steps, self.attempt, message=message),
        )

    def sync(self) -> None:
        """Sync every row and sample so far to disk, and flush the loggers."""
        self._metrics.sync()
        self._samples.sync()
        if self._loggers is not None:
            self._loggers.flush()

    def ended(self, state: str, result: Mapping[str, Any]) -> None:
        """Set the state and result with which `close` ends the loggers."""
        self._ending = (state, result)

    def close(self) -> str:
        """Close the files, then the loggers; return which rows the loggers lack, "" if none."""
        self._metrics.close()
        self._samples.close()
        return "" if self._loggers is None else self._loggers.close(*self._ending)
