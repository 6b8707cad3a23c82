"""A blocking rate limiter for somebody's own training loop: `produced` and `consume` hold one ratio."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from types import TracebackType

from retrain.config.flow import is_count
from retrain.controllers.rate import JsonState, RateAccount
from retrain.pipeline.monitor import Monitor


@dataclass(frozen=True, slots=True)
class RateStats:
    """What a limiter did so far."""

    ratio: float | None  # realised samples per batch over the target; None before the first batch or if off
    produced: int  # samples
    consumed: float  # batches
    discarded: int  # samples
    balance: float  # samples there beyond what the batches consumed cost
    producer_wait_s: float  # summed over the threads that reported samples
    consumer_wait_s: float


class RateLimiter:
    """Holds the ratio of samples produced to batches consumed, by making the faster side wait.

    Producers call `produced(n)` with n samples in hand, before they hand them on; consumers call
    `consume()` before they take a batch. Any number of threads on both sides.

    Args:
        samples_per_batch: samples to produce per batch consumed (see `samples_per_batch`); None or 0
            is off: nothing waits for the pace, everything is counted.
        watermark: samples to be there before the first batch; counting starts with it.
        max_staleness: oldest policy version, counted back from the current one, that `is_stale` accepts.

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
        """Report samples; waits first while there are too many for the pace. Gives the seconds waited.

        All of them come in at once, so report few at a time to hold the ratio tightly.

        Raises:
            ValueError: no whole number of at least one sample.
            TimeoutError: still too many after `timeout_s`; the samples are not counted.
            ClosedError: the limiter was closed.
        """
        samples = _whole("samples", samples)
        with self._monitor:
            wait_s = self._monitor.wait_until(
                lambda: self._account.may_produce(asked=self._asked), timeout_s, "batches to be consumed"
            )
            self._producer_wait_s += wait_s
            self._account.add(samples)
            self._monitor.wake()
        return wait_s

    def consume(self, batches: int = 1, timeout_s: float | None = None) -> float:
        """Take the right to consume batches; waits while too few samples came. Gives the seconds waited.

        Raises:
            ValueError: no whole number of at least one batch.
            TimeoutError: still too few after `timeout_s`; nothing is consumed.
            ClosedError: the limiter was closed.
        """
        batches = _whole("batches", batches)
        with self._monitor:
            self._asked += batches
            self._monitor.wake()  # producers may go further for several batches at once
            try:
                wait_s = self._monitor.wait_until(
                    lambda: self._account.may_consume(batches), timeout_s, "samples to be produced"
                )
            finally:
                self._asked -= batches
            self._consumer_wait_s += wait_s
            self._account.take(batches)
            self._monitor.wake()
        return wait_s

    def is_stale(self, sampled_version: int, current_version: int) -> bool:
        """Whether a sample is too old to train on; report those dropped with `discard`."""
        return self.max_staleness is not None and current_version - sampled_version > self.max_staleness

    def discard(self, samples: int) -> None:
        """Take back samples that were dropped unused, so that fresh ones may replace them."""
        samples = _whole("samples", samples)
        with self._monitor:
            self._account.discard(samples)
            self._monitor.wake()

    def finish(self) -> None:
        """Say that nothing more will be produced: consumers pass without waiting."""
        with self._monitor:
            self._account.finished = True
            self._monitor.wake()

    def close(self) -> None:
        """Wake every waiter with `ClosedError`; safe to call twice."""
        with self._monitor:
            self._monitor.close()

    def stats(self) -> RateStats:
        """Return counts and waits so far; a wait that is going on counts once it is over."""
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

    def state_dict(self) -> JsonState:
        """Return the counts, JSON-able; samples that you hold are yours to save."""
        with self._monitor:
            return self._account.state_dict()

    def load_state_dict(self, state: Mapping[str, float | int | bool]) -> None:
        """Go on from what `state_dict` gave."""
        with self._monitor:
            self._account.load_state_dict(state)
            self._monitor.wake()

    def __enter__(self) -> RateLimiter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _whole(name: str, value: int) -> int:
    """Return a positive whole number, also of numpy's, as a plain one; any other would poison the counts."""
    if not isinstance(value, Integral) or value < 1:
        raise ValueError(f"{name}: got {value!r}; needs a whole number of at least 1")
    return int(value)
