"""The load of the machine, which a run watches if it is to leave room for other work."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from retrain.config.schema import ThrottleSection
from retrain.control.rules import StateDict
from retrain.control.rules.throttle import ThrottleState
from retrain.records.layout import CampaignFiles
from retrain.records.run_state import worker_pids
from retrain.records.text import about
from retrain.trainer.journal import Journal
from retrain.trainer.part import Loop, Part

if TYPE_CHECKING:
    from retrain.control.machine.throttle import TrainingThrottle

POLL_S = 5.0  # as often as a paused throttle looks at the load


class LoadThrottle(Part):
    """Waits, before a step, while the machine's load allows nothing; watches nothing unless it is enabled."""

    name = "machine"

    def __init__(
        self, table: ThrottleSection, campaign: CampaignFiles, stop: threading.Event, journal: Journal
    ) -> None:
        """Prepare; other workers of the campaign are no foreign load."""
        self._stop, self._journal = stop, journal
        self._throttle: TrainingThrottle | None = None
        self.load: ThrottleState | None = None  # before the step that is taken; None: it is not watched
        self.waited_s = 0.0  # before that step
        if table.enabled:
            from retrain.control.machine.throttle import throttle_of  # here: few runs watch the load

            self._throttle = throttle_of(table, lambda: worker_pids(campaign.runs))

    def before_step(self, loop: Loop) -> None:
        if self._throttle is None:
            return
        self.load, self.waited_s = self._throttle.current(), 0.0
        if self.load.should_train:
            return
        began_s = time.monotonic()

        def show(load: ThrottleState) -> None:
            waited_s = time.monotonic() - began_s
            since = f" for {about(waited_s)}" if waited_s >= 1.0 else ""
            self._journal.phase(f"paused{since}: {load.reason}", loop.step)

        show(self.load)
        self.load = self._throttle.wait_for_idle(poll=POLL_S, stop=self._stop, on_poll=show)
        self.waited_s = time.monotonic() - began_s

    def state_dict(self) -> StateDict:
        return {} if self._throttle is None else self._throttle.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        if self._throttle is not None and state:
            self._throttle.load_state_dict(state)
