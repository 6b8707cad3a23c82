"""Asynchronous sampling: buffers, what may happen next, and the limiter that paces production.

Here is the limiter, which blocks in any training loop to keep the ratio of samples to batches. `Monitor` is
the one place where its threads wait, and those of `retrain.trainer.source`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral

from retrain.base.errors import RetrainError
from retrain.config.flow import is_count
from retrain.control.rules import StateDict
from retrain.control.rules.rate import RateAccount


class ClosedError(RetrainError):
    """What is waited for was closed before or during the wait."""


class Monitor(threading.Condition):
    """A lock with a condition that measures waits and wakes waiters when closed; hold it in every call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.is_closed = False
        self._clock = clock

    def wait_until(self, is_ready: Callable[[], bool], timeout_s: float | None, awaited: str) -> float:
        """Wait until `is_ready()`, checked again after every `notify_all`; return the seconds waited.

        Raises:
            ClosedError: closed before it was ready.
            TimeoutError: not ready within `timeout_s`.
        """
        start = self._clock()
        self.wait_for(lambda: self.is_closed or is_ready(), timeout_s)
        self.check_open(awaited)
        if not is_ready():
            raise TimeoutError(
                f"waited {timeout_s} s for {awaited}; raise timeout_s, or check that the other side runs"
            )
        return self._clock() - start

    def check_open(self, awaited: str) -> None:
        """Raise `ClosedError` if it was closed meanwhile."""
        if self.is_closed:
            raise ClosedError(f"closed while waiting for {awaited}")

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the lock, and have all waiters look again afterwards."""
        with self:
            try:
                yield
            finally:
                self.notify_all()

    def close(self) -> None:
        """Raise `ClosedError` in every present and future waiter."""
        self.is_closed = True
        self.notify_all()


@dataclass(frozen=True, slots=True)
class RateStats:
    """Counts and waits of a limiter so far."""

    ratio: float | None  # realised samples per batch over the target; None before a batch or if off
    produced: int  # samples
    consumed: float  # batches
    discarded: int  # samples
    balance: float  # samples beyond those that the consumed batches cost
    producer_wait_s: float  # summed over producer threads
    consumer_wait_s: float


class RateLimiter:
    """Keeps the ratio of samples produced to batches consumed by making the faster side wait.

    Producers call `produced(n)` with n samples in hand, before passing them on; consumers call `consume()`
    before taking a batch. Both sides may use any number of threads.

    Args:
        samples_per_batch: samples to produce per batch consumed (see `retrain.config.flow`); None or 0 is
            off: nothing waits for the pace, but everything is counted.
        watermark: samples that must be there before the first batch; the ratio counts from then on.
        max_staleness: greatest age in policy versions that `is_stale` accepts; None: any age.

    Raises:
        ValueError: a setting is negative or not finite.
    """

    def __init__(
        self,
        samples_per_batch: float | None,
        watermark: int = 0,
        max_staleness: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if max_staleness is not None and not is_count(max_staleness, 0):
            needed = "a whole number of at least 0, or None for any age"
            raise ValueError(f"max_staleness: got {max_staleness!r}; needs {needed}")
        self.max_staleness = max_staleness
        self._account = RateAccount(samples_per_batch, watermark)
        self._monitor = Monitor(clock)
        self._asked = 0  # batches that consumers wait for
        self._producer_wait_s = 0.0
        self._consumer_wait_s = 0.0

    def produced(self, samples: int = 1, timeout_s: float | None = None) -> float:
        """Report samples, after waiting while there are too many for the pace; return the seconds waited.

        They count all at once, so report few at a time to keep the ratio tightly.

        Raises:
            ValueError: `samples` is not a whole number of at least 1.
            TimeoutError: still too many after `timeout_s`; the samples do not count.
            ClosedError: the limiter was closed.
        """
        samples = _whole("samples", samples)
        with self._monitor.changing():
            wait_s = self._monitor.wait_until(
                lambda: self._account.may_produce(asked=self._asked), timeout_s, "batches to be consumed"
            )
            self._producer_wait_s += wait_s
            self._account.add(samples)
        return wait_s

    def consume(self, batches: int = 1, timeout_s: float | None = None) -> float:
        """Claim batches, after waiting while there are too few samples; return the seconds waited.

        Raises:
            ValueError: `batches` is not a whole number of at least 1.
            TimeoutError: still too few after `timeout_s`; nothing is consumed.
            ClosedError: the limiter was closed.
        """
        batches = _whole("batches", batches)
        with self._monitor.changing():
            self._asked += batches
            self._monitor.notify_all()  # a claim of several batches lets producers go further
            try:
                wait_s = self._monitor.wait_until(
                    lambda: self._account.may_consume(batches), timeout_s, "samples to be produced"
                )
            finally:
                self._asked -= batches
            self._consumer_wait_s += wait_s
            self._account.take(batches)
        return wait_s

    def is_stale(self, sampled_version: int, current_version: int) -> bool:
        """Whether a sample is too old to train on; report dropped ones with `discard`."""
        return self.max_staleness is not None and current_version - sampled_version > self.max_staleness

    def discard(self, samples: int) -> None:
        """Uncount samples that were dropped unused, so that fresh ones may replace them."""
        samples = _whole("samples", samples)
        with self._monitor.changing():
            self._account.discard(samples)

    def finish(self) -> None:
        """Declare that production has ended: consumers no longer wait."""
        with self._monitor.changing():
            self._account.finished = True

    def close(self) -> None:
        """Wake every waiter with `ClosedError`; safe to call twice."""
        with self._monitor:
            self._monitor.close()

    def stats(self) -> RateStats:
        """Return counts and waits so far; a wait counts once it is over."""
        with self._monitor:
            account = self._account
            return RateStats(
                ratio=account.ratio,
                produced=account.produced,
                consumed=account.consumed,
                discarded=account.discarded,
                balance=account.balance,
                producer_wait_s=self._producer_wait_s,
                consumer_wait_s=self._consumer_wait_s,
            )

    def state_dict(self) -> StateDict:
        """Return the counts, JSON-able; saving the samples is up to the caller."""
        with self._monitor:
            return self._account.state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        """Restore what `state_dict` returned."""
        with self._monitor.changing():
            self._account.load_state_dict(state)

    def __enter__(self) -> RateLimiter:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _whole(name: str, value: int) -> int:
    """Return a positive whole number, possibly numpy's, as an int; any other would corrupt the counts."""
    if not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name}: got {value!r}; needs a whole number of at least 1")
    return int(value)
