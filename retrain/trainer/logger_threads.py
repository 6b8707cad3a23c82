"""The loggers of a run, none of which can delay or end the training.

Each logger runs in its own thread, which reads metrics.jsonl behind the trainer: however slow it is, no row
is lost or kept in memory. Rows are passed on every few seconds, because most tools take many at once for
little more than the price of one. A failed call is retried; then the logger is given up, with a line in the
run's log. The last step known to be logged is stored with the run. Rows missing at its end are logged by the
next attempt, or by `resume` if the run is finished.
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

CLOSING_S = 600.0  # after the run's end; a logger that takes longer is abandoned


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
        """Start a thread for every logger that the configuration names, without waiting for it.

        Args:
            config: the run's configuration.
            files: the run's files.
            attempt: number of the attempt whose rows are logged.
            resumed_from_step: earlier rows up to this step are logged too where a logger lacks them.
            is_leaving: whether this process was asked to stop, which shortens `close`.
        """
        run = _logged_run(config, files, attempt, resumed_from_step)
        params = config.logging.logger_params
        self._is_leaving = is_leaving
        self._loggers = [LoggerThread(name, run, params.get(name, {})) for name in config.logging.loggers]

    def begin(self) -> None:
        """Log what is appended to metrics.jsonl from now on; its writer has repaired the end of the file."""
        for logger in self._loggers:
            logger.rows.begin()

    def recorded(self, step: int) -> None:
        """Announce a row that was appended to metrics.jsonl."""
        for logger in self._loggers:
            logger.recorded(step)

    def flush(self) -> None:
        """Ask the loggers to flush and to store how far they are; does not wait."""
        for logger in self._loggers:
            logger.ask(flush=True)

    def close(self, state: str, result: Row) -> str:
        """Close every logger; abandon those that make no progress or take too long.

        Returns:
            Which loggers lack how many rows; "" if none.
        """
        for logger in self._loggers:
            logger.ask(ending=Ending(state, result))
        ends_at = time.monotonic() + (CLOSING_S if state == RunState.DONE else LEAVING_S)
        for logger in self._loggers:
            ends_at = logger.wait(ends_at, self._is_leaving)
        lacking = [what for logger in self._loggers if (what := logger.lacking())]
        return f"{' and '.join(lacking)}; `retrain resume` logs them" if lacking else ""


def deliver(
    config: Config, files: RunFiles, attempt: int, result: Row, is_leaving: Callable[[], bool]
) -> str:
    """Log the rows that loggers of a finished run lack; return what they still lack, like `close`.

    Only for the holder of the run's lock.
    """
    final = {key: value for key, value in result.items() if key not in ("steps", "resumed_from_step")}
    return LoggerThreads(config, files, attempt, _steps_of(result), is_leaving).close(RunState.DONE, final)


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
