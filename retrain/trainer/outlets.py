"""Hands a run's rows to its loggers, none of which can hold up or end the training.

Each logger lives in a thread of its own behind a bounded queue. A failure is tried again with the next
rows and then given up, with a word in the run's log. What is known to be logged is written beside the run, so
that the next attempt of the run first logs what is missing, from metrics.jsonl.
"""

from __future__ import annotations

import contextlib
import queue
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retrain import registry
from retrain.config.resolve import as_tables
from retrain.config.schema import Config
from retrain.errors import RecordsError
from retrain.loggers import LoggedRun, Logger, Row
from retrain.loggers._public import without_secrets
from retrain.records.atomic import read_json, write_json
from retrain.records.files import make_directory
from retrain.records.layout import RunFiles
from retrain.records.metrics import read_metrics
from retrain.records.run_state import RunState

MOST_WAITING = 2000  # rows; beyond, they are left to the next attempt
TRIES = 3
PAUSE_S = 1.0  # between two tries
CLOSING_S = 60.0  # for a tool to take a finished run's last rows; then it is left behind
LEAVING_S = 20.0  # the same for a run that was asked to leave, and is killed 30 s later
LONGEST_REASON = 300  # characters; some tools put a whole SQL statement into an error
GIVEN_UP = "is given up for this attempt; training goes on, and metrics.jsonl has everything"
LEFT_TO_NEXT = "goes on with this attempt's rows; the next attempt tries the others again"


@dataclass(frozen=True)
class _Ending:
    state: str
    result: Row


_FLUSH = object()


class Outlets:
    """The loggers of one attempt."""

    def __init__(self, config: Config, files: RunFiles, attempt: int, resumed_from_step: int) -> None:
        """Open every logger that the configuration names, each in its own thread; returns at once."""
        run = _logged_run(config, files, attempt, resumed_from_step)
        params = config.logging.logger_params
        self._outlets = [_Outlet(name, run, params.get(name, {})) for name in config.logging.loggers]

    def row(self, row: Row) -> None:
        """Pass a recorded row on."""
        for outlet in self._outlets:
            outlet.put(dict(row))

    def flush(self) -> None:
        """Have everything so far made to last, and written down that it is; does not wait."""
        for outlet in self._outlets:
            outlet.put(_FLUSH)

    def close(self, state: str, result: Row) -> None:
        """End every logger; one that does not end in time is left behind."""
        for outlet in self._outlets:
            outlet.put(_Ending(state, result))
        deadline = time.monotonic() + (CLOSING_S if state == RunState.DONE else LEAVING_S)
        for outlet in self._outlets:
            outlet.wait(deadline)


class _Outlet:
    """One logger and its thread."""

    def __init__(self, name: str, run: LoggedRun, params: Mapping[str, Any]) -> None:
        self._name = name
        self._params = params
        self._store = run.directory / "loggers" / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.json"
        self._run = run
        self._waiting: queue.Queue[Any] = queue.Queue(MOST_WAITING)
        self._logged_step = 0  # every step up to here is logged ...
        self._safe_step = 0  # ... and up to here not lost by a kill
        self._unsettled: deque[tuple[float, int]] = deque()  # when, and up to which step
        self._has_gap = False
        self._is_over = False
        self._thread = threading.Thread(target=self._work, name=f"logger {name}", daemon=True)
        self._thread.start()

    def put(self, what: Any) -> None:
        if self._is_over:
            return
        try:
            self._waiting.put_nowait(what)
        except queue.Full:
            if isinstance(what, _Ending):  # it may yet catch up: wait for room, in its own time
                with contextlib.suppress(queue.Full):
                    self._waiting.put(what, timeout=LEAVING_S)
            elif not self._has_gap:
                self._say("is too slow; the rows that it misses are logged when the run is resumed")
            self._has_gap = True

    def wait(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._say("did not end in time and is left behind")

    def _work(self) -> None:
        try:
            logger = self._try("open", self._open)
            if logger is not None:
                caught_up = self._try(
                    "log what an earlier attempt missed", lambda: self._catch_up(logger), LEFT_TO_NEXT
                )
                self._has_gap = self._has_gap or caught_up is None
                self._pass_on(logger)
        finally:
            self._is_over = True

    def _open(self) -> Logger:
        stored = _stored(self._store)
        self._write_down(
            str(stored.get("id", "")), stored.get("step", 0)
        )  # before a tool begins a run in vain
        run = replace(self._run, stored_id=str(stored.get("id", "")))
        opened = registry.find("loggers", self._name)(run, **self._params)
        logger: Logger = registry.check_made("loggers", self._name, opened)
        step = stored.get("step", 0)
        is_known = logger.id == run.stored_id and isinstance(step, int)
        self._logged_step = self._safe_step = min(step, run.resumed_from_step) if is_known else 0
        self._write_down(logger.id, self._safe_step)
        return logger

    def _catch_up(self, logger: Logger) -> bool:
        first, last = self._logged_step + 1, self._run.resumed_from_step
        if first <= last:
            logger.rows([row for row in read_metrics(self._run.directory) if first <= row["step"] <= last])
            self._logged_step = last
            self._unsettled.append((time.monotonic(), last))
        return True

    def _pass_on(self, logger: Logger) -> None:
        while True:
            rows, order = self._take()
            if rows and self._try("log", lambda rows=rows: self._log(logger, rows)) is None:  # type: ignore[misc]
                return
            if order is _FLUSH and self._try("flush", lambda: self._flush(logger)) is None:
                return
            if isinstance(order, _Ending):
                self._try("end", lambda order=order: self._end(logger, order))  # type: ignore[misc]
                return

    def _take(self) -> tuple[list[Row], object]:
        """Wait for something, and give all rows that are there, up to an order."""
        rows: list[Row] = []
        what = self._waiting.get()
        while isinstance(what, dict):
            rows.append(what)
            try:
                what = self._waiting.get_nowait()
            except queue.Empty:
                return rows, None
        return rows, what

    def _log(self, logger: Logger, rows: Sequence[Row]) -> bool:
        logger.rows(rows)
        if not self._has_gap:
            self._logged_step = rows[-1]["step"]
            self._unsettled.append((time.monotonic(), self._logged_step))
        return True

    def _flush(self, logger: Logger) -> bool:
        logger.flush()
        settled_at = time.monotonic() - getattr(logger, "settles_s", 0.0)
        while self._unsettled and self._unsettled[0][0] <= settled_at:
            _, self._safe_step = self._unsettled.popleft()
        self._write_down(logger.id, self._safe_step)
        return True

    def _end(self, logger: Logger, ending: _Ending) -> bool:
        logger.flush()
        logger.close(ending.state, ending.result)
        self._safe_step = self._logged_step
        self._write_down(logger.id, self._safe_step)
        return True

    def _write_down(self, known_id: str, step: int) -> None:
        make_directory(self._store.parent)
        write_json(self._store, {"id": known_id, "step": step}, durable=False)

    def _try(self, doing: str, act: Callable[[], Any], otherwise: str = GIVEN_UP) -> Any:
        """Do something a few times; None if it failed each time, which is said with each new reason."""
        said = ""
        for number in range(1, TRIES + 1):
            try:
                return act()
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a logger's edge: nothing of it may reach the training
                if (what := f"cannot {doing} ({type(error).__name__}: {_in_short(error)})") != said:
                    self._say(said := what)
                time.sleep(PAUSE_S * (number < TRIES))
        self._say(otherwise)
        return None

    def _say(self, what: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(f"logger {self._name} {what}", file=sys.stderr, flush=True)


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


def _in_short(error: BaseException) -> str:
    first = next(iter(str(error).splitlines()), "")
    return str(without_secrets(first))[:LONGEST_REASON]


def _stored(path: Path) -> Mapping[str, Any]:
    try:
        return read_json(path) or {}
    except RecordsError:  # damaged: begin anew
        return {}
