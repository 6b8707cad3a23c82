"""The permits of one run: API calls in flight, and the time spent waiting for and holding permits."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import replace
from pathlib import Path

from retrain.backends import Permit
from retrain.base.errors import RecordsError
from retrain.config.schema import Config
from retrain.control.rules.concurrency_limit import CallFacts
from retrain.control.semaphore import FileSemaphore
from retrain.control.semaphore.adaptive import SharedLimit
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.row_parts import PermitUse
from retrain.records.step_row import StepRow
from retrain.trainer.part import Loop, Part, TakenStep

log = logging.getLogger(__name__)
UNREPORTED = "the backend reports no call to spec.observe_call; set a number"


class RunPermits(Part):
    """Hands out permits and sums the time that this run waited for and held them.

    They are the run's own if a launcher divided permits among runs, which then sets their number. Otherwise
    its campaign shares them, or all campaigns that name the same `throttle_dir` do.
    """

    def __init__(self, config: Config, files: RunFiles, campaign: CampaignFiles) -> None:
        """Prepare; the semaphore is opened at the first use."""
        share, adapts = int(os.environ.get("RETRAIN_OWN_PERMITS") or 0), config.backend.adapts_permits
        shared = Path(config.backend.throttle_dir or campaign.permits)
        self._directory = files.directory / "permits" if share else shared
        self._permits = share or config.backend.first_permits
        self._is_fixed = share > 0 and not adapts
        self.label = config.run.run_id if config.run else "run"  # the holder's, in `FileSemaphore.inspect`
        self._semaphore: FileSemaphore | None = None
        self.observe_call = self._observe if adapts else None
        self._lock = threading.Lock()
        self._waited_s = 0.0
        self._held_s = 0.0
        self._reports = not adapts  # whether the backend has reported a call, or need not
        self._unreported: str | None = None  # set once permits were held and no call was reported

    def after_step(self, loop: Loop, taken: TakenStep, row: StepRow) -> StepRow:
        return replace(row, permits=self.take_use())

    def permit(self) -> Permit:
        """Return one permit for use with `with` or `async with`; entering waits for it."""
        return self.open()

    def open(self) -> FileSemaphore:
        with self._lock:
            if self._semaphore is None:  # the campaign warns if locks are not shared
                self._semaphore = FileSemaphore(
                    self._directory, self._permits, self.label, allow_unshared=True, count=self._count
                )
                if self._is_fixed and self._semaphore.permits != self._permits:
                    self._semaphore.set_permits(self._permits)  # a resume may have changed the share
            return self._semaphore

    def _count(self, waited_s: float, held_s: float) -> None:
        """Add the time that one permit was waited for or held."""
        with self._lock:
            self._waited_s += waited_s
            self._held_s += held_s

    def take_use(self) -> PermitUse:
        """Return the waits and holds since the last call, and the number of permits if it adapts."""
        permits = self.open().permits if self.observe_call is not None else None
        with self._lock:
            waited_s, held_s = self._waited_s, self._held_s
            self._waited_s = self._held_s = 0.0
        if held_s and not self._reports and not self._unreported:
            self._unreported = UNREPORTED
            log.warning('backend.max_concurrent = "auto" stays at %s permits: %s', permits, UNREPORTED)
        fixed = None if self._reports else self._unreported
        return PermitUse(wait_s=waited_s, held_s=held_s, permits=permits, permits_fixed=fixed)

    def _observe(self, call: CallFacts) -> None:
        self._reports = True
        try:
            SharedLimit(self._directory, self.open(), self.label).observe(call)
        except RecordsError as error:  # must not cost the call its result
            log.warning("the number of permits was not changed: %s", error)
