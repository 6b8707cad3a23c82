"""Launchers: where workers execute.

A plugin is one file with `open_launcher() -> Launcher`. A launcher starts `python -m retrain.worker
RUN_DIR` somewhere and notices its end. What became of the run is read from its directory: the
engine's word is only a hint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker's end: which run, and the exit code (minus the signal if one ended it; None if unknown)."""

    run_id: str
    exit_code: int | None


class Launcher(Protocol):
    """Starts, watches and ends workers."""

    def describe(self) -> str:
        """Say in a few words where workers execute."""
        ...

    def submit(self, run_id: str, run_dir: Path) -> None:
        """Start a worker for a run.

        Raises:
            LaunchError: it cannot be started.
        """
        ...

    def adopt(self, run_id: str, run_dir: Path) -> None:
        """Watch a worker that an earlier orchestrator started."""
        ...

    def poll(self, timeout_s: float) -> Sequence[Ended]:
        """Wait until a worker ends, `wake` is called, or the time is over; give the workers that ended."""
        ...

    def wake(self) -> None:
        """Somebody asked to stop: make a `poll` that is under way return; callable from a signal handler."""
        ...

    def cancel(self, run_id: str, *, now: bool) -> None:
        """Ask a worker to save and leave, or end it at once; does nothing if it has ended."""
        ...
