"""Runs in MLflow: a campaign is an experiment; condition and seed are tags.

Without a tracking server (`tracking_uri` or MLFLOW_TRACKING_URI) everything goes into one SQLite file per
campaign; view it with `mlflow ui --backend-store-uri sqlite:///DIR/mlflow.db`. Recent
versions of MLflow refuse its older file store.

The logger is in a process of its own, for MLflow takes 10 ms of processor time per row, which training would
lack. That reads one request per line of JSON and answers with one line. It ends with its parent, however the
parent ends, even while a call hangs.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from retrain.base import extras
from retrain.base.line_process import LineProcess, lines_of, private_pipes
from retrain.config.resolve import flatten
from retrain.plugins.loggers import LoggedRun, Logger, Row, numbers, written_at_s

EXTRA = "mlflow"
PACKAGES = ("mlflow", "sqlalchemy", "alembic")  # the last two for SQLite
AT_ONCE = 1000  # metrics per call; MLflow refuses more
PARAMETERS_AT_ONCE = 100
LONGEST_NAME, LONGEST_PARAMETER = 250, 500
REFUSED_IN_NAME = re.compile(r"[^\w.\- ]")  # a user's own keys may hold any character
IN_EVERY_ROW = "step_time_s"  # shows which steps MLflow has; it takes a row whole or not at all
SQLITE = "sqlite:///"
OPENING_TIMEOUT_S = 120.0  # creating the tables takes seconds, one run at a time
PLACES = ("directory", "campaign_directory")  # which JSON has as text
ENDING_S = 10.0  # for its process to exit once everything is logged
STATUS = {"done": "FINISHED", "interrupted": "KILLED"}

T = TypeVar("T")


def open_logger(run: LoggedRun, *, tracking_uri: str = "", experiment: str = "") -> Logger:
    """Start an MLflow run, or continue the one of an earlier attempt.

    Args:
        run: the run to log.
        tracking_uri: of a server or database; default: MLFLOW_TRACKING_URI, else a file of the campaign.
        experiment: its name; default: the campaign's.
    """
    params = {"tracking_uri": tracking_uri, "experiment": experiment}
    return LoggerProcess(__name__, "open_here", run, params)


class LoggerProcessError(Exception):
    """The logger raised an error in its process, or the process ended."""


class LoggerProcess(Logger):
    """Forwards calls to a logger in a child process and raises its errors."""

    def __init__(self, module: str, function: str, run: LoggedRun, params: Mapping[str, Any]) -> None:
        """Open a logger by a function of a module, given a run and parameters as JSON, in a child process."""
        self.child = LineProcess("retrain.plugins.loggers.mlflow", module, function)
        try:
            places = {key: str(getattr(run, key)) for key in PLACES}
            opened = self._ask("open", asdict(run) | places, params)
        except BaseException:
            self.child.end()
            raise
        self.id, self.durable_after_s = str(opened["id"]), float(opened["durable_after_s"])

    def rows(self, rows: Sequence[Row]) -> None:
        self._ask("rows", rows)

    def flush(self) -> None:
        self._ask("flush")

    def close(self, state: str, result: Row) -> None:
        """End the tracker's run and the process."""
        try:
            self._ask("close", state, result)
        finally:
            self.child.end(ENDING_S)

    def _ask(self, what: str, *arguments: Any) -> Any:
        self.child.send([what, *arguments])
        answer = json.loads(self.child.receive() or '{"error": "its process ended"}')
        if "error" in answer:
            raise LoggerProcessError(answer["error"])
        return answer


def open_here(run: LoggedRun, *, tracking_uri: str, experiment: str) -> Logger:
    """Open the logger in this process."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    local_uri = SQLITE + str(run.campaign_directory / "mlflow.db")
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or local_uri
    return _Mlflow(run, uri, experiment or run.campaign or "retrain")


class _Mlflow(Logger):
    def __init__(self, run: LoggedRun, uri: str, experiment: str) -> None:
        tracking = extras.load("mlflow.tracking", EXTRA, "mlflow")
        self._entities = extras.load("mlflow.entities", EXTRA, "mlflow")
        with _alone(uri) as database:
            if database is not None and not (database.exists() and database.stat().st_size):
                # under another name: MLflow cannot open a database in which a kill left half of the tables
                beside = database.with_name(f"{database.name}.new")
                for left in (beside, beside.with_name(f"{beside.name}-journal")):
                    left.unlink(missing_ok=True)
                tracking.MlflowClient(SQLITE + str(beside))
                beside.replace(database)
            self.client = tracking.MlflowClient(uri)
            existing = self.client.get_experiment_by_name(experiment)
            within = existing.experiment_id if existing else self.client.create_experiment(experiment)
        self._held: set[int] = set()  # steps that MLflow has
        self.id = ""
        with suppress(extras.load("mlflow.exceptions", EXTRA, "mlflow").MlflowException):
            if run.stored_id:  # neither deleted nor of another store
                self.client.update_run(run.stored_id, status="RUNNING")
                self.id = run.stored_id
        if self.id:
            self.client.set_tag(self.id, "attempt", str(run.attempt))
            self._held = {point.step for point in self.client.get_metric_history(self.id, IN_EVERY_ROW)}
        else:
            self.id = self._begin(run, within)

    def rows(self, rows: Sequence[Row]) -> None:
        """Log steps that MLflow lacks: it cannot overwrite a value and would draw both."""
        missing = [row for row in rows if row["step"] not in self._held]
        most = max((len(numbers(row)) for row in missing), default=1)
        for part in _parts(missing, max(1, AT_ONCE // max(1, most))):
            metrics = [
                self._entities.Metric(key, value, int(1000 * written_at_s(row)), row["step"])
                for row in part
                for key, value in numbers(row).items()
            ]
            self.client.log_batch(self.id, metrics=metrics)
            self._held.update(row["step"] for row in part)

    def close(self, state: str, result: Row) -> None:  # each call was a transaction
        for key, value in numbers(result).items():
            self.client.log_metric(self.id, f"final_{key}", value)
        self.client.set_terminated(self.id, STATUS.get(state, "FAILED"))

    def _begin(self, run: LoggedRun, within: str) -> str:
        tags = {"campaign": run.campaign, "condition": run.condition, "seed": str(run.seed)}
        mlflow_run = self.client.create_run(
            within, run_name=run.run_id, tags=tags | {"attempt": str(run.attempt)}
        )
        named = {REFUSED_IN_NAME.sub("_", key)[:LONGEST_NAME]: value for key, value in flatten(run.settings)}
        settings = [self._entities.Param(key, str(value)[:LONGEST_PARAMETER]) for key, value in named.items()]
        for part in _parts(settings, PARAMETERS_AT_ONCE):
            self.client.log_batch(mlflow_run.info.run_id, params=part)
        return str(mlflow_run.info.run_id)


@contextmanager
def _alone(uri: str) -> Iterator[Path | None]:
    """Hold a lock while a database is opened; yield its file if it is SQLite, else None."""
    if not uri.startswith(SQLITE):
        yield None
        return
    import filelock  # here: importing it takes 50 ms, and `plugins` opens no logger

    path = Path(uri.removeprefix(SQLITE).partition("?")[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with filelock.FileLock(path.with_name(f"{path.name}.lock"), OPENING_TIMEOUT_S):
            yield path
    except filelock.Timeout:
        raise TimeoutError(
            f"another run has held the lock of {path} for {OPENING_TIMEOUT_S:.0f} s while opening it"
        ) from None


def _parts(things: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (things[start : start + size] for start in range(0, len(things), size))


def main(module: str, function: str) -> None:
    """Answer requests until the parent closes the pipe or ends."""
    requests, answers = private_pipes()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a cluster tells every process; the parent decides when to end
    logger: Any = None
    for line in lines_of(requests):
        what, *arguments = json.loads(line)
        try:
            answer = {}
            if what == "open":
                run, params = arguments
                opener = getattr(importlib.import_module(module), function)
                logger = opener(LoggedRun(**run | {key: Path(run[key]) for key in PLACES}), **params)
                durable_after_s = getattr(logger, "durable_after_s", Logger.durable_after_s)
                answer = {"id": logger.id, "durable_after_s": durable_after_s}
            else:
                getattr(logger, what)(*arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - every error goes to the parent
            answer = {"error": f"{type(error).__name__}: {error}"}
        with suppress(OSError):
            answers.write(json.dumps(answer).encode() + b"\n")
        if what == "close":
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
