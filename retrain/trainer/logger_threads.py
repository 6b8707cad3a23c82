"""Hands a run's rows to its loggers, none of which can hold up or end the training.

Each logger lives in a thread of its own, which reads metrics.jsonl behind the trainer: however slow it is,
no row is lost and none is kept in memory. Rows are handed over every few seconds, because most tools take
many at once for little more than one. A failure is tried again with the next rows and then given up, with a
word in the run's log. What is known to be logged is written beside the run; what is missing at its end is
logged by the next attempt, or by `resume` if the run is finished.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from retrain.config.resolve import as_tables
from retrain.config.schema import Config
from retrain.loggers import LoggedRun, Row
from retrain.loggers.public import without_secrets
from retrain.records.layout import RunFiles
from retrain.records.metrics import is_step
from retrain.records.run_state import RunState
from retrain.trainer.logger_thread import LEAVING_S, Ending, LoggerThread, stored_step

CLOSING_S = 600.0  # a tool that is still not done so long after the run's end is left behind


class LoggerThreads:
    """The loggers of one attempt."""

    def __init__(
        self,
        config: Config,
        files: RunFiles,
        attempt: int,
        resumed_from_step: int,
        is_leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        """Open every logger that the configuration names, each in its own thread; returns at once.

        Args:
            config: names the loggers.
            files: of the run.
            attempt: whose rows are logged.
            resumed_from_step: rows up to there that a logger lacks are logged too.
            is_leaving: whether this process was asked to leave, which cuts `close` short.
        """
        run = _logged_run(config, files, attempt, resumed_from_step)
        params = config.logging.logger_params
        self._is_leaving = is_leaving
        self._loggers = [LoggerThread(name, run, params.get(name, {})) for name in config.logging.loggers]

    def begin(self) -> None:
        """Log what is appended to metrics.jsonl from now on; its writer has repaired the file's end."""
        for outlet in self._loggers:
            outlet.rows.begin()

    def recorded(self, step: int) -> None:
        """Pass on the row of a step, which stands in metrics.jsonl."""
        for outlet in self._loggers:
            outlet.recorded(step)

    def flush(self) -> None:
        """Have everything so far made to last, and written down that it is; does not wait."""
        for outlet in self._loggers:
            outlet.ask(flush=True)

    def close(self, state: str, result: Row) -> str:
        """End every logger; one that makes no progress, or takes too long, is left behind.

        Returns:
            Which loggers lack how many rows; "" if none does.
        """
        for outlet in self._loggers:
            outlet.ask(ending=Ending(state, result))
        ends_at = time.monotonic() + (CLOSING_S if state == RunState.DONE else LEAVING_S)
        for outlet in self._loggers:
            ends_at = outlet.wait(ends_at, self._is_leaving)
        lacking = [what for outlet in self._loggers if (what := outlet.lacking())]
        return f"{' and '.join(lacking)}; `retrain resume` logs them" if lacking else ""


def deliver(
    config: Config, files: RunFiles, attempt: int, result: Row, is_leaving: Callable[[], bool]
) -> str:
    """Log what the loggers of a finished run lack; return what they lack still, as `Outlets.close` does.

    Only for the holder of the run's lock.
    """
    came_out = {key: value for key, value in result.items() if key not in ("steps", "resumed_from_step")}
    return LoggerThreads(config, files, attempt, _steps_of(result), is_leaving).close(RunState.DONE, came_out)


def is_behind(config: Config, files: RunFiles, result: Row) -> bool:
    """Whether a finished run's loggers lack rows."""
    steps = _steps_of(result)
    return any(stored_step(files.directory, name) < steps for name in config.logging.loggers)


def _logged_run(config: Config, files: RunFiles, attempt: int, resumed_from_step: int) -> LoggedRun:
    run = config.run
    return LoggedRun(
        campaign=run.campaign if run else "",
        run_id=run.run_id if run else files.directory.name,
        condition=run.condition if run else "",
        seed=config.training.seed,
        attempt=attempt,
        resumed_from_step=resumed_from_step,
        directory=files.directory.absolute(),
        settings=without_secrets(as_tables(config)),
        stored_id="",
    )


def _steps_of(result: Row) -> int:
    steps = result.get("steps")
    return steps if is_step(steps) else 0
