"""Runs in Trackio: a campaign is a project, a condition is a group.

Without a Space (`space_id` or TRACKIO_SPACE_ID) everything goes into a folder of the campaign, or into
TRACKIO_DIR; view it with `TRACKIO_DIR=DIR/trackio trackio show`. Trackio has one open run per process and
reads TRACKIO_DIR when it is imported, so the logger is in a process of its own, as that of MLflow. Trackio
drops what it cannot write; a flush therefore waits until its file has the rows.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Sequence
from typing import Any

from retrain.base import extras
from retrain.plugins.loggers import LoggedRun, Logger, Row, numbers
from retrain.plugins.loggers.mlflow import LoggerProcess

EXTRA = "trackio"
PACKAGES = ("trackio",)
WRITTEN_S = 20.0  # at most until its file has what was logged; its thread writes twice a second
POLL_S = 0.05


def open_logger(run: LoggedRun, *, project: str = "", space_id: str = "") -> Logger:
    """Start a Trackio run, or continue the one of an earlier attempt.

    Args:
        run: the run to log.
        project: its project; default: the campaign. In a named one, runs have the campaign's name as well.
        space_id: a Hugging Face Space, as "user/space"; default: TRACKIO_SPACE_ID, else none.
    """
    return LoggerProcess(__name__, "open_here", run, {"project": project, "space_id": space_id})


def open_here(run: LoggedRun, *, project: str, space_id: str) -> Logger:
    """Open the logger in this process, which must not have imported Trackio."""
    os.environ.setdefault("TRACKIO_DIR", str(run.campaign_directory / "trackio"))
    return _Trackio(run, project, space_id or os.environ.get("TRACKIO_SPACE_ID", ""))


class _Trackio(Logger):
    def __init__(self, run: LoggedRun, project: str, space_id: str) -> None:
        trackio = extras.load("trackio", EXTRA, "trackio")
        self._storage = extras.load("trackio.sqlite_storage", EXTRA, "trackio").SQLiteStorage
        self._project = project or run.campaign or "retrain"
        self._is_local = not space_id and not os.environ.get("TRACKIO_SERVER_URL")
        told = {"campaign": run.campaign, "condition": run.condition, "seed": run.seed}
        with contextlib.redirect_stdout(io.StringIO()):  # it greets
            self._run = trackio.init(
                self._project,
                name=f"{run.campaign}-{run.run_id}" if project and run.campaign else run.run_id,
                group=run.condition or None,
                space_id=space_id or None,
                config=dict(run.settings) | told,
                resume="allow" if run.stored_id else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        self.id = str(self._run.id)
        self.durable_after_s = 0.0 if self._is_local else WRITTEN_S
        self._last = self._written() if run.stored_id else 0  # step that Trackio has

    def rows(self, rows: Sequence[Row]) -> None:
        """Log steps that Trackio lacks: it cannot overwrite a value and would draw both."""
        for row in rows:
            if row["step"] > self._last:
                self._run.log(numbers(row), step=row["step"])
                self._last = row["step"]

    def flush(self) -> None:
        """Wait until the rows are in its file; raise OSError if they do not come to be."""
        until_s = time.monotonic() + WRITTEN_S
        while self._is_local and self._written() < self._last:
            if time.monotonic() > until_s:
                raise OSError(f"Trackio has written up to step {self._written()} of {self._last}")
            time.sleep(POLL_S)

    def close(self, state: str, result: Row) -> None:
        final = {f"final_{key}": value for key, value in numbers(result).items()}
        if final:
            self._run.log(final, step=self._last)
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()

    def _written(self) -> int:
        name, run_id = self._run.name, self._run.id
        step: Any = self._storage.get_max_step_for_run(self._project, name, run_id=run_id)
        return int(step or 0)
