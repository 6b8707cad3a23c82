"""Watches the machine's load for one run and pauses it while the load is too high."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from retrain import registry
from retrain.config.schema import Throttle
from retrain.records.run_state import worker_pids
from retrain.system.throttle import ThrottleState, TrainingThrottle


class MachineLoad:
    """The load throttle of one run; other workers of its campaign do not count as foreign load."""

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
        """Return the current level; wait while it is `paused`, until a stop is requested."""
        if self._state is None or self._throttle.should_check():
            self._state = self._throttle.check()
        if not self._state.should_train:
            on_pause(self._state)
            self._state = self._throttle.wait_for_idle(stop=self._stop, on_poll=on_pause)
        return self._state

    def state_dict(self) -> dict[str, Any]:
        """Return the level and the time since the load fell, JSON-able."""
        return self._throttle.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; the load is read again before the next step."""
        self._throttle.load_state_dict(state)
