"""The loggers of a run, none of which can delay or end the training.

Each logger runs in its own thread, which reads metrics.jsonl behind the trainer: however slow it is, no row
is lost or kept in memory. Rows are passed on every few seconds, because most tools take many at once for
little more than the price of one. A failed call is retried; then the logger is given up, with a line in the
run's log. The last step known to be logged is stored with the run. Rows missing at its end are logged by the
next attempt, or by `resume` if the run is finished.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from retrain.base import registry, user_code
from retrain.base.errors import RecordsError
from retrain.base.redaction import redacted
from retrain.config.resolve import as_tables
from retrain.config.schema import Config
from retrain.plugins.loggers import LoggedRun, Logger, Row, without_secrets
from retrain.records.files import make_directory, read_json, write_json
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.lines import is_count, parse_line
from retrain.records.metrics import read_metrics
from retrain.records.run_state import RunState

T = TypeVar("T")

PAUSE_BETWEEN_S = 2.0  # rows of this period are passed on together
FIRST_AT_ONCE, MOST_AT_ONCE = 32, 512  # rows per call, doubled or halved so that a call takes ...
SHORT_CALL_S, LONG_CALL_S = 1.0, 5.0  # ... between these, which shows progress
TRIES, PAUSE_S = 3, 1.0  # of a call, and between two of them
CLOSING_S = 600.0  # after the run's end; a logger that takes longer is abandoned
SILENT_S = 60.0  # likewise; a logger that takes no row for longer is abandoned
LEAVING_S = 20.0  # instead of both, for a run that was asked to stop: it is killed after 30 s
LONGEST_REASON = 300  # characters; some tools put a whole SQL statement into an error
GIVEN_UP = "is off for this attempt; training continues, and metrics.jsonl has every row"
LEFT_TO_NEXT = "continues with this attempt's rows; the next attempt retries the earlier ones"


@dataclass(frozen=True)
class LoggerThreads:
    """The loggers of one attempt."""

    loggers: Sequence[_LoggerThread] = ()
    is_leaving: Callable[[], bool] = lambda: False  # this process was asked to stop, which shortens `close`

    def begin(self) -> None:
        """Log what is appended to metrics.jsonl from now on; its writer has repaired the end of the file."""
        for logger in self.loggers:
            logger.begin()

    def recorded(self, step: int) -> None:
        for logger in self.loggers:
            logger.recorded(step)

    def flush(self) -> None:
        """Ask the loggers to flush and to store how far they are; does not wait."""
        for logger in self.loggers:
            logger.ask(flush=True)

    def close(self, state: str, result: Row) -> str:
        """Close every logger, or abandon it if it is stuck; return who lacks how many rows, "" if none."""
        for logger in self.loggers:
            logger.ask(ending=(state, result))
        ends_at = time.monotonic() + (CLOSING_S if state == RunState.DONE else LEAVING_S)
        for logger in self.loggers:
            ends_at = logger.wait(ends_at, self.is_leaving)
        lacking = [what for logger in self.loggers if (what := logger.lacking())]
        return f"{' and '.join(lacking)}; `retrain resume` logs them" if lacking else ""


NO_LOGGERS = LoggerThreads()


def open_loggers(
    config: Config,
    files: RunFiles,
    campaign: CampaignFiles,
    attempt: int,
    resumed_from_step: int,
    is_leaving: Callable[[], bool],
) -> LoggerThreads:
    """Start a thread for each logger, which gets the rows up to `resumed_from_step` too if it lacks them."""
    run, params = config.run, config.logging.logger_params
    logged = LoggedRun(
        campaign=run.campaign if run else "",
        run_id=run.run_id if run else files.directory.name,
        condition=run.condition if run else "",
        seed=config.training.seed,
        attempt=attempt,
        resumed_from_step=resumed_from_step,
        directory=files.directory.absolute(),
        settings=without_secrets(as_tables(config)),
        stored_id="",
        campaign_directory=campaign.directory.absolute(),
    )
    names = config.logging.loggers
    return LoggerThreads([_LoggerThread(name, logged, params.get(name, {})) for name in names], is_leaving)


def deliver(
    config: Config,
    files: RunFiles,
    campaign: CampaignFiles,
    attempt: int,
    result: Row,
    is_leaving: Callable[[], bool],
) -> str:
    """Log the rows that a finished run's loggers lack, holding its lock; return what they still lack."""
    final = {key: value for key, value in result.items() if key not in ("steps", "resumed_from_step")}
    loggers = open_loggers(config, files, campaign, attempt, _steps_of(result), is_leaving)
    return loggers.close(RunState.DONE, final)


def is_behind(config: Config, files: RunFiles, result: Row) -> bool:
    """Whether a finished run's loggers lack rows."""
    stores = (_store(files.directory, name) for name in config.logging.loggers)
    return any(_stored(store)[1] < _steps_of(result) for store in stores)


def _steps_of(result: Row) -> int:
    steps = result.get("steps")
    return steps if is_count(steps) else 0


class _GivenUpError(Exception):
    """Every try of a call failed."""


class _LoggerThread:
    """One logger and its thread, which reads this attempt's rows from metrics.jsonl as they are appended."""

    def __init__(self, name: str, run: LoggedRun, params: Mapping[str, Any]) -> None:
        self._name = name
        self._params = params
        self._store = _store(run.directory, name)
        self._run = run
        self._metrics = RunFiles(run.directory).metrics
        self._at: int | None = None  # offset of the next row; None before the attempt writes rows
        self._news = threading.Condition()  # guards the next four attributes
        self._is_recorded = self._must_flush = False
        self._ending: tuple[str, Row] | None = None
        self._last_step = run.resumed_from_step  # the last one in metrics.jsonl
        self._at_once = FIRST_AT_ONCE
        self._moved_at = time.monotonic()  # when the tool last took a row
        self._logged_step = 0  # all steps up to this one are logged ...
        self._safe_step = 0  # ... and up to this one safe from a kill
        self._unsafe: deque[tuple[float, int]] = deque()  # (time, last step) of calls that are not safe yet
        self._has_gap = False
        self._thread = threading.Thread(target=self._work, name=f"logger {name}", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        self._at = self._metrics.stat().st_size

    def recorded(self, step: int) -> None:
        with self._news:
            self._last_step, self._is_recorded = step, True
            self._news.notify()

    def ask(self, *, flush: bool = False, ending: tuple[str, Row] | None = None) -> None:
        with self._news:
            self._must_flush |= flush
            self._ending = ending
            self._news.notify()

    def wait(self, ends_at: float, is_leaving: Callable[[], bool]) -> float:
        """Wait for the thread; return the time at which to abandon the next logger."""
        began_at = time.monotonic()
        while self._thread.is_alive():
            time_s = time.monotonic()
            if is_leaving():
                ends_at = min(ends_at, time_s + LEAVING_S)  # counted from when it began to leave
            if time_s > ends_at or time_s - max(began_at, self._moved_at) > SILENT_S:
                self._say("did not finish in time and was abandoned")
                break
            self._thread.join(min(0.5, max(0.0, ends_at - time_s) + 0.01))
        return ends_at

    def lacking(self) -> str:
        missing = self._last_step - (self._logged_step if self._thread.is_alive() else self._safe_step)
        return f"{self._name} lacks {missing} of {self._last_step} rows" if missing > 0 else ""

    def _work(self) -> None:
        with contextlib.suppress(_GivenUpError):
            logger = self._try("open", self._open)

            def log_earlier_rows() -> None:
                last = self._run.resumed_from_step
                rows = read_metrics(self._run.directory) if self._logged_step < last else []
                while rows := [row for row in rows if self._logged_step < row["step"] <= last]:
                    self._log(logger, rows[: self._at_once])

            try:
                self._try("log earlier rows", log_earlier_rows, LEFT_TO_NEXT)
            except _GivenUpError:
                self._has_gap = True
            self._pass_on(logger)

    def _open(self) -> Logger:
        known_id, step = _stored(self._store)
        self._write_down(known_id, step)  # fails before the tool creates a run
        run = replace(self._run, stored_id=known_id)
        opened = registry.find_plugin("loggers", self._name)(run, **self._params)
        logger: Logger = registry.check_made("loggers", self._name, opened)
        self._logged_step = self._safe_step = min(step, run.resumed_from_step) if logger.id == known_id else 0
        self._moved_at = time.monotonic()
        self._write_down(logger.id, self._safe_step)
        return logger

    def _pass_on(self, logger: Logger) -> None:
        ending = None
        while ending is None:
            with self._news:  # wait for rows, then for more rows, unless a flush or the end is requested
                self._news.wait_for(lambda: self._is_recorded or self._must_flush or self._ending)
                self._news.wait_for(lambda: self._must_flush or self._ending, PAUSE_BETWEEN_S)
                must_flush, ending = self._must_flush, self._ending
                self._must_flush = self._is_recorded = False
            while self._try("log", lambda: self._log_next(logger)):
                pass
            if must_flush:
                self._try("flush", lambda: self._flush(logger))
        self._try("end", lambda: self._end(logger, *ending))

    def _log_next(self, logger: Logger) -> bool:
        """Log the next rows; False if there are none. If that fails, the next call starts with the same."""
        if self._at is None:
            return False
        rows: list[Row] = []
        end = self._at
        with self._metrics.open("rb") as file:
            file.seek(end)
            while len(rows) < self._at_once and (line := file.readline()).endswith(b"\n"):
                end += len(line)
                row = parse_line(line) or {}
                if is_count(row.get("step")) and row.get("attempt") == self._run.attempt:
                    rows.append(row)
        if rows:
            self._log(logger, rows)
        self._at = end
        return bool(rows)

    def _log(self, logger: Logger, rows: Sequence[Row]) -> None:
        began = time.monotonic()
        logger.rows(rows)
        self._moved_at = time.monotonic()
        if self._moved_at - began > LONG_CALL_S:
            self._at_once = max(1, len(rows) // 2)
        elif self._moved_at - began < SHORT_CALL_S:
            self._at_once = min(MOST_AT_ONCE, 2 * self._at_once)
        if not self._has_gap:
            self._logged_step = rows[-1]["step"]
            self._unsafe.append((self._moved_at, self._logged_step))

    def _flush(self, logger: Logger) -> None:
        logger.flush()
        safe_at = time.monotonic() - getattr(logger, "durable_after_s", Logger.durable_after_s)
        while self._unsafe and self._unsafe[0][0] <= safe_at:
            _, self._safe_step = self._unsafe.popleft()
        self._write_down(logger.id, self._safe_step)

    def _end(self, logger: Logger, state: str, result: Row) -> None:
        logger.flush()
        logger.close(state, result)
        self._safe_step = self._logged_step
        self._write_down(logger.id, self._safe_step)

    def _write_down(self, known_id: str, step: int) -> None:
        make_directory(self._store.parent)
        write_json(self._store, {"id": known_id, "step": step}, durable=False)

    def _try(self, doing: str, act: Callable[[], T], otherwise: str = GIVEN_UP) -> T:
        """Call `act` up to `TRIES` times; print each new error, and raise `_GivenUpError` if all failed."""
        last_problem = ""
        for number in range(1, TRIES + 1):
            try:
                return act()
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a logger must not end the training
                whole = user_code.fault_of(error) or f"{type(error).__name__}: {error}"
                short = redacted(whole.splitlines()[0])[:LONGEST_REASON]
                if (problem := f"cannot {doing} ({short})") != last_problem:
                    self._say(last_problem := problem)
                if number < TRIES:
                    time.sleep(PAUSE_S)
        self._say(otherwise)
        raise _GivenUpError

    def _say(self, what: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(f"logger {self._name} {what}", file=sys.stderr, flush=True)


def _store(directory: Path, name: str) -> Path:
    return directory / "loggers" / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.json"


def _stored(path: Path) -> tuple[str, int]:
    """Return a run's id in a tool, and the last step up to which the tool is known to have its rows."""
    stored: Mapping[str, Any] = {}
    with contextlib.suppress(RecordsError):  # damaged: start over
        stored = read_json(path) or {}
    step = stored.get("step")
    return str(stored.get("id", "")), step if is_count(step) else 0
