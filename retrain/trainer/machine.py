"""What the machine's load allows this run, and waiting while it allows nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from retrain import registry
from retrain.config.schema import Throttle
from retrain.records.workers import worker_pids
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
            own_pids=lambda: worker_pids(run_dir.parent) if run_dir.parent.name == "runs" else (),
            on_unknown=table.on_unknown,
        )
        self._state: ThrottleState | None = None

    def allowed(self, on_pause: Callable[[ThrottleState], None]) -> ThrottleState:
        """Return the present level, waiting while it is `paused` or until somebody asks to stop."""
        if self._state is None or self._throttle.should_check():
            self._state = self._throttle.check()
        if not self._state.should_train:
            on_pause(self._state)
            self._state = self._throttle.wait_for_idle(stop=self._stop, on_poll=on_pause)
        return self._state

    def state_dict(self) -> dict[str, Any]:
        """Return the level, and for how long the load has allowed less."""
        return self._throttle.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`; the load is measured anew before the next step."""
        self._throttle.load_state_dict(state)
