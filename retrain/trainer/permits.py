"""The right to call the API, and how long the run waited for it and used it."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from retrain.backends import Permit
from retrain.controllers.permits import CallFacts
from retrain.errors import RecordsError
from retrain.records.step_row import PermitUse
from retrain.semaphore import FileSemaphore
from retrain.semaphore.adaptive import SharedPermits

Raised: TypeAlias = tuple[type[BaseException] | None, BaseException | None, TracebackType | None]
log = logging.getLogger(__name__)


class RunPermits:
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

    def permit(self) -> Permit:
        """Return the right to one call: held while entered, by `with` or `async with`; waits for it."""
        return _OnePermit(self)

    def open(self) -> FileSemaphore:
        """Return the semaphore."""
        with self._lock:
            if self._semaphore is None:  # where locks are not shared, the campaign has said so
                self._semaphore = FileSemaphore(
                    self._directory, self._permits, self._label, allow_unshared=True
                )
                if self._is_fixed and self._semaphore.permits != self._permits:
                    self._semaphore.set_permits(self._permits)  # resumed with other workers beside it
            return self._semaphore

    def count(self, *, waited_s: float = 0.0, held_s: float = 0.0) -> None:
        """Add what one permit was waited for or held."""
        with self._lock:
            self._waited_s += waited_s
            self._held_s += held_s

    def take_use(self) -> PermitUse:
        """Return the waits and holds since the last call, and how many permits there are if that changes."""
        permits = self.open().permits if self.observe_call is not None else None
        with self._lock:
            use = PermitUse(wait_s=self._waited_s, held_s=self._held_s, permits=permits)
            self._waited_s = self._held_s = 0.0
        return use

    def _observe(self, call: CallFacts) -> None:
        semaphore = self.open()
        with self._lock:
            if self._shared is None:
                self._shared = SharedPermits(self._directory, semaphore, self._label)
        try:
            self._shared.observe(call)
        except RecordsError as error:  # a call's result is worth more than the number of permits
            log.warning("the permits stay as they are: %s", error)


class _OnePermit:
    """One permit of a gate, taken once."""

    def __init__(self, gate: RunPermits) -> None:
        self._gate = gate

    def __enter__(self) -> None:
        self._semaphore, asked = self._gate.open(), time.perf_counter()
        self._semaphore.__enter__()
        self._begin(asked)

    def __exit__(self, *raised: *Raised) -> None:
        self._semaphore.__exit__(*raised)
        self._end()

    async def __aenter__(self) -> None:
        self._semaphore, asked = self._gate.open(), time.perf_counter()
        await self._semaphore.__aenter__()
        self._begin(asked)

    async def __aexit__(self, *raised: *Raised) -> None:
        await self._semaphore.__aexit__(*raised)
        self._end()

    def _begin(self, asked: float) -> None:
        self._since = time.perf_counter()
        self._gate.count(waited_s=self._since - asked)

    def _end(self) -> None:
        self._gate.count(held_s=time.perf_counter() - self._since)
