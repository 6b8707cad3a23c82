"""One logger in its own thread, which reads metrics.jsonl behind the trainer."""

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
from typing import Any

from retrain import registry
from retrain.errors import RecordsError
from retrain.loggers import LoggedRun, Logger, Row
from retrain.loggers.public import without_secrets
from retrain.records.atomic import read_json, write_json
from retrain.records.files import make_directory
from retrain.records.layout import RunFiles
from retrain.records.lines import parse_line
from retrain.records.metrics import is_step, read_metrics

PAUSE_BETWEEN_S = 2.0  # rows of this period are passed on together
FIRST_AT_ONCE, MOST_AT_ONCE = 32, 512  # rows per call, doubled or halved so that a call takes ...
SHORT_CALL_S, LONG_CALL_S = 1.0, 5.0  # ... between these, which shows progress
TRIES = 3
PAUSE_S = 1.0  # between two attempts
SILENT_S = 60.0  # after the run's end; a logger that takes no row for longer is abandoned
LEAVING_S = 20.0  # the same for a run that was asked to stop: it is killed after 30 s
LONGEST_REASON = 300  # characters; some tools put a whole SQL statement into an error
GIVEN_UP = "is off for this attempt; training continues, and metrics.jsonl has every row"
LEFT_TO_NEXT = "continues with this attempt's rows; the next attempt retries the earlier ones"


@dataclass(frozen=True)
class Ending:
    """How a run ended, and its result."""

    state: str
    result: Row


class _Rows:
    """Reads one attempt's rows from metrics.jsonl as they are appended."""

    def __init__(self, path: Path, attempt: int) -> None:
        self._path = path
        self._attempt = attempt
        self._at: int | None = None

    def begin(self) -> None:
        self._at = self._path.stat().st_size

    def pass_on(self, most: int, log: Callable[[list[Row]], object]) -> int:
        """Log the next rows and return how many; if that fails, the next call starts with the same rows."""
        if self._at is None:
            return 0
        found: list[Row] = []
        end = self._at
        with self._path.open("rb") as file:
            file.seek(end)
            while len(found) < most and (line := file.readline()).endswith(b"\n"):
                end += len(line)
                row = parse_line(line)
                if row is not None and is_step(row.get("step")) and row.get("attempt") == self._attempt:
                    found.append(row)
        if found:
            log(found)
        self._at = end
        return len(found)


class LoggerThread:
    """One logger and its thread."""

    def __init__(self, name: str, run: LoggedRun, params: Mapping[str, Any]) -> None:
        self._name = name
        self._params = params
        self._store = _store(run.directory, name)
        self._run = run
        self.rows = _Rows(RunFiles(run.directory).metrics, run.attempt)
        self._news = threading.Condition()  # guards the next four attributes
        self._is_recorded = self._must_flush = False
        self._ending: Ending | None = None
        self._last_step = run.resumed_from_step  # the last one in metrics.jsonl
        self._at_once = FIRST_AT_ONCE
        self._moved_at = time.monotonic()  # when the tool last took a row
        self._logged_step = 0  # all steps up to this one are logged ...
        self._safe_step = 0  # ... and up to this one safe from a kill
        self._unsettled: deque[tuple[float, int]] = (
            deque()
        )  # (time, last step) of calls that are not yet safe
        self._has_gap = False
        self._thread = threading.Thread(target=self._work, name=f"logger {name}", daemon=True)
        self._thread.start()

    def recorded(self, step: int) -> None:
        with self._news:
            self._last_step, self._is_recorded = step, True
            self._news.notify()

    def ask(self, *, flush: bool = False, ending: Ending | None = None) -> None:
        with self._news:
            self._must_flush |= flush
            self._ending = ending
            self._news.notify()

    def wait(self, ends_at: float, is_leaving: Callable[[], bool]) -> float:
        """Wait for the thread; return the time at which to abandon the next logger."""
        began_at, is_cut = time.monotonic(), False
        while self._thread.is_alive():
            now = time.monotonic()
            if is_leaving() and not is_cut:
                ends_at, is_cut = min(ends_at, now + LEAVING_S), True
            if now > ends_at or now - max(began_at, self._moved_at) > SILENT_S:
                self._say("did not finish in time and was abandoned")
                break
            self._thread.join(min(0.5, max(0.0, ends_at - now) + 0.01))
        return ends_at

    def lacking(self) -> str:
        missing = self._last_step - (self._logged_step if self._thread.is_alive() else self._safe_step)
        return f"{self._name} lacks {missing} of {self._last_step} rows" if missing > 0 else ""

    def _work(self) -> None:
        logger = self._try("open", self._open)
        if logger is None:
            return
        caught_up = self._try(
            "log what an earlier attempt missed", lambda: self._catch_up(logger), LEFT_TO_NEXT
        )
        self._has_gap = caught_up is None
        self._pass_on(logger)

    def _open(self) -> Logger:
        known_id = str(_stored(self._store).get("id", ""))
        step = stored_step(self._run.directory, self._name)
        self._write_down(known_id, step)  # fails before the tool creates a run
        run = replace(self._run, stored_id=known_id)
        opened = registry.find("loggers", self._name)(run, **self._params)
        logger: Logger = registry.check_made("loggers", self._name, opened)
        is_known = logger.id == run.stored_id
        self._logged_step = self._safe_step = min(step, run.resumed_from_step) if is_known else 0
        self._moved_at = time.monotonic()
        self._write_down(logger.id, self._safe_step)
        return logger

    def _catch_up(self, logger: Logger) -> bool:
        last = self._run.resumed_from_step
        if self._logged_step >= last:
            return True
        rows = [row for row in read_metrics(self._run.directory) if row["step"] <= last]
        while rows := [row for row in rows if row["step"] > self._logged_step]:
            self._log(logger, rows[: self._at_once])
        return True

    def _pass_on(self, logger: Logger) -> None:
        while True:
            must_flush, ending = self._next()
            while logged := self._try("log", lambda: self._log_next(logger)):
                pass
            if logged is None:
                return
            if must_flush and self._try("flush", lambda: self._flush(logger)) is None:
                return
            if ending is not None:
                self._try("end", lambda ending=ending: self._end(logger, ending))  # type: ignore[misc]
                return

    def _next(self) -> tuple[bool, Ending | None]:
        """Wait for rows, then for more rows, unless a flush or the end is requested."""

        def is_asked() -> bool:
            return self._must_flush or self._ending is not None

        with self._news:
            self._news.wait_for(lambda: self._is_recorded or is_asked())
            self._news.wait_for(is_asked, PAUSE_BETWEEN_S)
            must_flush, self._must_flush, self._is_recorded = self._must_flush, False, False
            return must_flush, self._ending

    def _log_next(self, logger: Logger) -> int:
        return self.rows.pass_on(self._at_once, lambda rows: self._log(logger, rows))

    def _log(self, logger: Logger, rows: Sequence[Row]) -> bool:
        began = time.monotonic()
        logger.rows(rows)
        self._moved_at = time.monotonic()
        if self._moved_at - began > LONG_CALL_S:
            self._at_once = max(1, len(rows) // 2)
        elif self._moved_at - began < SHORT_CALL_S:
            self._at_once = min(MOST_AT_ONCE, 2 * self._at_once)
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

    def _end(self, logger: Logger, ending: Ending) -> bool:
        logger.flush()
        logger.close(ending.state, ending.result)
        self._safe_step = self._logged_step
        self._write_down(logger.id, self._safe_step)
        return True

    def _write_down(self, known_id: str, step: int) -> None:
        make_directory(self._store.parent)
        write_json(self._store, {"id": known_id, "step": step}, durable=False)

    def _try(self, doing: str, act: Callable[[], Any], otherwise: str = GIVEN_UP) -> Any:
        """Call `act` up to `TRIES` times; print each new error, and return None if all failed."""
        said = ""
        for number in range(1, TRIES + 1):
            try:
                return act()
            except (Exception, SystemExit) as error:  # noqa: BLE001 - a logger must not end the training
                if (what := f"cannot {doing} ({_in_short(error)})") != said:
                    self._say(said := what)
                time.sleep(PAUSE_S * (number < TRIES))
        self._say(otherwise)
        return None

    def _say(self, what: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(f"logger {self._name} {what}", file=sys.stderr, flush=True)


def stored_step(directory: Path, name: str) -> int:
    """Return the last step up to which a tool is known to have a run's rows."""
    step = _stored(_store(directory, name)).get("step", 0)
    return step if is_step(step) else 0


def _store(directory: Path, name: str) -> Path:
    return directory / "loggers" / f"{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.json"


def _in_short(error: BaseException) -> str:
    whole = registry.fault_of(error) or f"{type(error).__name__}: {error}"
    return str(without_secrets(whole.splitlines()[0]))[:LONGEST_REASON]


def _stored(path: Path) -> Mapping[str, Any]:
    try:
        return read_json(path) or {}
    except RecordsError:  # damaged: start over
        return {}
