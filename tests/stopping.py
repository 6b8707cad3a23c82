"""Ways for a run to be asked to stop at a moment that a test chooses."""

from __future__ import annotations

import threading

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
