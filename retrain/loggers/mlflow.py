"""Runs in MLflow: a campaign is an experiment; condition and seed are tags.

Without a tracking server (`tracking_uri` or MLFLOW_TRACKING_URI) everything goes into one SQLite file per
campaign; view it with `mlflow ui --backend-store-uri sqlite:///DIR/mlflow.db`. Recent
versions of MLflow refuse its older file store.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from retrain import extras
from retrain.config.resolve import flatten
from retrain.loggers import LoggedRun, Logger, Row, numbers, written_at_s
from retrain.loggers.process import LoggerProcess

EXTRA = "mlflow"
PACKAGES = ("mlflow", "sqlalchemy", "alembic")  # the last two for SQLite
AT_ONCE = 1000  # metrics per call; MLflow refuses more
PARAMETERS_AT_ONCE = 100
LONGEST_PARAMETER = 500
IN_EVERY_ROW = "step_time_s"  # shows which steps MLflow has; it takes a row whole or not at all
SQLITE = "sqlite:///"
OPENING_TIMEOUT_S = 120.0  # creating the tables takes seconds, one run at a time
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
    return LoggerProcess(__name__, "open_here", run, params)  # MLflow takes 10 ms of processor time per row


def open_here(run: LoggedRun, *, tracking_uri: str, experiment: str) -> Logger:
    """Open the logger in this process."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or SQLITE + str(_home(run) / "mlflow.db")
    return _Mlflow(run, uri, experiment or run.campaign or "retrain")


class _Mlflow:
    durable_after_s = 0.0

    def __init__(self, run: LoggedRun, uri: str, experiment: str) -> None:
        tracking = extras.load("mlflow.tracking", EXTRA, "mlflow")
        self._entities = extras.load("mlflow.entities", EXTRA, "mlflow")
        with _alone(uri) as database:
            if database is not None:
                _make_tables(database, tracking.MlflowClient)
            self.client = tracking.MlflowClient(uri)
            known = self.client.get_experiment_by_name(experiment)
            within = known.experiment_id if known else self.client.create_experiment(experiment)
        self.id = self._resumed(run)
        self._held = self._steps() if self.id else set()
        self.id = self.id or self._begun(run, within)

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

    def flush(self) -> None:
        """Do nothing: each call is a transaction."""

    def close(self, state: str, result: Row) -> None:
        for key, value in numbers(result).items():
            self.client.log_metric(self.id, f"final_{key}", value)
        self.client.set_terminated(self.id, STATUS.get(state, "FAILED"))

    def _resumed(self, run: LoggedRun) -> str:
        if not run.stored_id:
            return ""
        try:
            self.client.update_run(run.stored_id, status="RUNNING")
        except extras.load("mlflow.exceptions", EXTRA, "mlflow").MlflowException:
            return ""  # deleted, or another store
        self.client.set_tag(run.stored_id, "attempt", str(run.attempt))
        return run.stored_id

    def _steps(self) -> set[int]:
        return {point.step for point in self.client.get_metric_history(self.id, IN_EVERY_ROW)}

    def _begun(self, run: LoggedRun, within: str) -> str:
        tags = {"campaign": run.campaign, "condition": run.condition, "seed": str(run.seed)}
        made = self.client.create_run(within, run_name=run.run_id, tags=tags | {"attempt": str(run.attempt)})
        settings = [
            self._entities.Param(key, str(value)[:LONGEST_PARAMETER]) for key, value in flatten(run.settings)
        ]
        for part in _parts(settings, PARAMETERS_AT_ONCE):
            self.client.log_batch(made.info.run_id, params=part)
        return str(made.info.run_id)


def _home(run: LoggedRun) -> Path:
    return run.directory.parent.parent if run.directory.parent.name == "runs" else run.directory


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


def _make_tables(path: Path, open_store: Callable[[str], Any]) -> None:
    """Create the database under another name, then rename it into place.

    MLflow cannot open a database in which a kill left half of the tables.
    """
    if path.exists() and path.stat().st_size:
        return
    beside = path.with_name(f"{path.name}.new")
    for left in (beside, beside.with_name(f"{beside.name}-journal")):
        left.unlink(missing_ok=True)
    open_store(SQLITE + str(beside))
    beside.replace(path)


def _parts(things: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (things[start : start + size] for start in range(0, len(things), size))
