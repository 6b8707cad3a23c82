"""Workers in this process, one after another: for debugging, and for tests of your own plugins."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path

from retrain import worker
from retrain.errors import LaunchError
from retrain.launchers import Ended
from retrain.records.files import open_log
from retrain.records.layout import RunFiles


def open_launcher() -> InlineLauncher:
    """Give a launcher that runs in this process."""
    return InlineLauncher()


class InlineLauncher:
    """Runs each submitted worker to its end, inside `submit`."""

    def __init__(self) -> None:
        self._ended: list[Ended] = []
        self._stop = threading.Event()

    def describe(self) -> str:
        """Say where workers execute."""
        return "this process, one run at a time"

    def submit(self, run_id: str, run_dir: Path) -> None:
        """Run a worker to its end; its output goes to the run's output.log."""
        with (
            open(open_log(RunFiles(run_dir).output_log), "w", encoding="utf-8") as log,  # noqa: PTH123
            contextlib.redirect_stdout(log),
            contextlib.redirect_stderr(log),
        ):
            self._ended.append(Ended(run_id, worker.run(run_dir, self._stop)))

    def adopt(self, run_id: str, run_dir: Path) -> None:
        """Refuse: a run that lives in another process cannot be taken into this one."""
        raise LaunchError(f"{run_dir}: {run_id} is still running elsewhere; wait for it, or stop it")

    def poll(self, timeout_s: float) -> Sequence[Ended]:
        """Give what ended; there is never anything to wait for."""
        del timeout_s
        ends, self._ended = self._ended, []
        return ends

    def wake(self) -> None:
        """Somebody asked to stop: the worker inside `submit` is to save and leave."""
        self._stop.set()

    def cancel(self, run_id: str, *, now: bool) -> None:
        """Stop the run at its next step boundary."""
        del run_id, now
        self._stop.set()
