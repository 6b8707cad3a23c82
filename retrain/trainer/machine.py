"""What the machine's load allows this run, and waiting while it allows nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from retrain import registry
from retrain.config.schema import Throttle
from retrain.records.layout import RunFiles
from retrain.records.locks import holder, is_held
from retrain.throttle import ThrottleState, TrainingThrottle


class MachineLoad:
    """Watches the load for one run; its campaign's other workers are not foreign to it."""

    def __init__(self, table: Throttle, run_dir: Path, stop: threading.Event) -> None:
        self._stop = stop
        self._throttle = TrainingThrottle(
            table.min_level,
            table.prefer_gpu,
            registry.find_function("throttle.load_fn", table.load_fn) if table.load_fn else None,
            scope=table.scope,
            own_pids=lambda: campaign_pids(run_dir),
            on_unknown=table.on_unknown,
        )
        self._state: ThrottleState | None = None

    def allowed(self, on_pause: Callable[[ThrottleState], None]) -> ThrottleState:
        """Give the present level, waiting while it is `paused` or until somebody asks to stop."""
        if self._state is None or self._throttle.should_check():
            self._state = self._throttle.check()
        if not self._state.should_train:
            on_pause(self._state)
            self._state = self._throttle.wait_for_idle(stop=self._stop, on_poll=on_pause)
        return self._state


def campaign_pids(run_dir: Path) -> set[int]:
    """Give the process ids of a campaign's workers, as their locks name them."""
    if run_dir.parent.name != "runs":
        return set()
    locks = (RunFiles(directory).lock for directory in run_dir.parent.iterdir())
    found = (holder(lock) for lock in locks if is_held(lock))  # a dead worker's id may be a stranger's now
    return {one.pid for one in found if one is not None}
