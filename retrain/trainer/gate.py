"""The right to call the API, and how long the run waited for it and used it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from retrain.controllers.permits import CallFacts
from retrain.errors import RecordsError
from retrain.semaphore import FileSemaphore
from retrain.semaphore.adaptive import SharedPermits

log = logging.getLogger(__name__)


class PermitGate:
    """Hands out the campaign's permits and adds up the time that this run waited for them and held them."""

    def __init__(
        self, directory: Path, permits: int, label: str, *, adapts: bool = False, is_own: bool = False
    ) -> None:
        """Prepare; the semaphore is opened when it is first needed.

        Args:
            directory: of the permits.
            permits: how many there are, if nobody has opened it before.
            label: shown to whoever asks who holds permits.
            adapts: the number follows what calls meet, see `observe_call`.
            is_own: they are this run's alone, so that their number is what is asked for.
        """
        self._directory = directory
        self._permits = permits
        self._label = label
        self._is_fixed = is_own and not adapts
        self._semaphore: FileSemaphore | None = None
        self._shared: SharedPermits | None = None
        self.observe_call = self._observe if adapts else None
        self._lock = threading.Lock()
        self._waited_s = 0.0
        self._held_s = 0.0

    @contextmanager
    def permit(self) -> Iterator[None]:
        """Hold one permit; blocks until there is one."""
        semaphore = self._get()
        asked = time.perf_counter()
        with semaphore:
            got = time.perf_counter()
            with self._lock:
                self._waited_s += got - asked
            try:
                yield
            finally:
                with self._lock:
                    self._held_s += time.perf_counter() - got

    def take_waited_s(self) -> float:
        """Give the seconds waited since this was last asked, over all calls."""
        with self._lock:
            waited, self._waited_s = self._waited_s, 0.0
        return waited

    def take_held_s(self) -> float:
        """Give the seconds that permits were held since this was last asked, over all calls that ended."""
        with self._lock:
            held, self._held_s = self._held_s, 0.0
        return held

    def row(self) -> dict[str, float]:
        """Give a step's fields: permits waited for and held, and how many there are if that changes."""
        row: dict[str, float] = {"permit_wait_s": self.take_waited_s(), "permit_held_s": self.take_held_s()}
        if self.observe_call is not None:
            row["permits"] = self._get().permits
        return row

    def _observe(self, call: CallFacts) -> None:
        semaphore = self._get()
        with self._lock:
            if self._shared is None:
                self._shared = SharedPermits(self._directory, semaphore, self._label)
        try:
            self._shared.observe(call)
        except RecordsError as error:  # a call's result is worth more than the number of permits
            log.warning("the permits stay as they are: %s", error)

    def _get(self) -> FileSemaphore:
        with self._lock:
            if self._semaphore is None:  # where locks are not shared, the campaign has said so
                self._semaphore = FileSemaphore(
                    self._directory, self._permits, self._label, allow_unshared=True
                )
                if self._is_fixed and self._semaphore.permits != self._permits:
                    self._semaphore.set_permits(self._permits)  # resumed with other workers beside it
            return self._semaphore
