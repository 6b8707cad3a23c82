"""Ways for a run to be asked to stop, or to be killed, at a moment that a test chooses."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from retrain.records.layout import RunFiles
from retrain.records.metrics import read_metrics


class StopAfterStep(threading.Event):
    """Asks to stop once the run's rows have reached a step."""

    def __init__(self, files: RunFiles, step: int) -> None:
        super().__init__()
        self._files, self._step = files, step

    def is_set(self) -> bool:
        return len(read_metrics(self._files.directory)) >= self._step


class StopAtLook(threading.Event):
    """Asks to stop when it is looked at so many times."""

    def __init__(self, look: int) -> None:
        super().__init__()
        self._left = look

    def is_set(self) -> bool:
        self._left -= 1
        return self._left <= 0


def kill_when(is_time: Callable[[], bool], command: Sequence[str], directory: Path) -> None:
    """Run a command, and kill it with all that it started when it is time, or after five minutes."""
    process = subprocess.Popen(command, cwd=directory, start_new_session=True, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 300
    while not is_time() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):  # it may just have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
