"""Curves in TensorBoard's event files, below each run's directory.

View a campaign with `tensorboard --logdir DIR/runs`. A resumed attempt tells TensorBoard which steps it
repeats, so that each is shown once. Only the package `tensorboard` is needed, no torch, no TensorFlow.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from retrain.base import extras
from retrain.plugins.loggers import LoggedRun, Logger, Row, numbers, written_at_s

EXTRA = "tensorboard"
PACKAGES = ("tensorboard",)


def open_logger(run: LoggedRun) -> Logger:
    """Open a new event file in the run's `tensorboard/`."""
    return _TensorBoard(run)


class _TensorBoard(Logger):
    id = "tensorboard"  # the directory

    def __init__(self, run: LoggedRun) -> None:
        def load(module: str) -> Any:
            return extras.load(f"tensorboard.{module}", EXTRA, "tensorboard")

        self._events = load("compat.proto.event_pb2")
        self._summaries = load("compat.proto.summary_pb2")
        writing = load("summary.writer.event_file_writer")
        self._writer = writing.EventFileWriter(
            str(run.directory / "tensorboard"), filename_suffix=f".attempt-{run.attempt:04d}"
        )
        if run.attempt > 1:
            log = self._events.SessionLog(status=self._events.SessionLog.START)
            self._add(run.resumed_from_step + 1, time.time(), session_log=log)

    def rows(self, rows: Sequence[Row]) -> None:
        for row in rows:
            values = [
                self._summaries.Summary.Value(tag=key, simple_value=value)
                for key, value in numbers(row).items()
            ]
            self._add(row["step"], written_at_s(row), summary=self._summaries.Summary(value=values))

    def flush(self) -> None:
        self._writer.flush()

    def close(self, state: str, result: Row) -> None:
        del state, result  # event files have no end; evaluations are in the rows
        self._writer.close()

    def _add(self, step: int, at_s: float, **what: Any) -> None:
        self._writer.add_event(self._events.Event(step=step, wall_time=at_s, **what))
