"""The load of the machine, which a run watches if it is to leave room for other work."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from retrain.config.schema import Config
from retrain.control.rules.throttle import ThrottleState
from retrain.records.layout import campaign_of
from retrain.records.run_state import worker_pids
from retrain.trainer.journal import Journal

if TYPE_CHECKING:
    from retrain.control.machine.throttle import TrainingThrottle


def open_throttle(config: Config, run_dir: Path) -> TrainingThrottle | None:
    """Return the load throttle of a run, for which other workers of its campaign are no foreign load."""
    table = config.throttle
    if not table.enabled:
        return None
    from retrain.control.machine.throttle import throttle_of  # here: few runs watch the load

    return throttle_of(table, lambda: worker_pids(campaign_of(run_dir).runs))


def wait_for_idle(
    throttle: TrainingThrottle | None, stop: threading.Event, journal: Journal, step: int
) -> ThrottleState | None:
    """Return what the machine's load allows; wait, after a step, while it allows nothing."""
    if throttle is None:
        return None
    if (state := throttle.current()).should_train:
        return state

    def show(state: ThrottleState) -> None:
        journal.phase(f"paused: {state.reason}", step)

    show(state)
    return throttle.wait_for_idle(stop=stop, on_poll=show)
