"""One number of permits for all workers of a campaign, adapted to what the API bears.

The controller's state lies beside the permits, in `adaptive.json`; whoever finished a call takes a
lock, goes on from that state and sets the semaphore's permits. Every change is a line of
`adaptive.jsonl`. Nothing is lost when a worker dies: the kernel frees the lock, the file is whole.
"""

from __future__ import annotations

import json
import logging
import time
from contextlib import closing
from pathlib import Path

from retrain.controllers.permits import AdaptivePermits, CallFacts
from retrain.errors import RecordsError
from retrain.records.atomic import read_json, write_json
from retrain.records.clock import utc_now
from retrain.semaphore import FileSemaphore
from retrain.semaphore.descriptors import LockFile

log = logging.getLogger(__name__)


class SharedPermits:
    """A worker's view of its campaign's adaptive permits."""

    def __init__(self, directory: Path, run_name: str, *, highest: int = 64) -> None:
        """Join the semaphore of an existing directory of permits.

        Raises:
            RecordsError: there is no semaphore.
        """
        self._directory = directory
        self._run_name = run_name
        self._highest = highest
        self._semaphore = FileSemaphore(directory, 1, run_name, allow_unshared=True)

    def observe(self, call: CallFacts) -> None:
        """Tell of a finished call; the number of permits follows.

        Raises:
            RecordsError: the directory cannot be written.
        """
        with closing(LockFile(str(self._directory / "adaptive.lock"))) as lock:
            lock.lock()
            controller = self._controller()
            before = self._semaphore.permits
            decision = controller.observe(time.monotonic(), call)
            write_json(self._directory / "adaptive.json", controller.state_dict(), durable=False)
            if decision.permits != before:  # changed, or set back by a campaign that was started again
                self._semaphore.set_permits(decision.permits)
                self._write_line(before, decision.permits, decision.reason)

    def _controller(self) -> AdaptivePermits:
        present = min(self._semaphore.permits, self._highest)
        controller = AdaptivePermits(present, highest=self._highest)
        try:
            state = read_json(self._directory / "adaptive.json")
            if state is not None:
                controller.load_state_dict(state)
        except (RecordsError, ValueError, TypeError, KeyError, AttributeError):
            controller = AdaptivePermits(present, highest=self._highest)  # what it learned is learned again
        return controller

    def _write_line(self, before: int, permits: int, reason: str) -> None:
        line = {"at": utc_now(), "from": before, "permits": permits, "reason": reason, "run": self._run_name}
        with (self._directory / "adaptive.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        log.warning("permits: %d -> %d, because %s", before, permits, reason)
