"""Asynchronous sampling: buffers, what may happen next, and the limiter that paces production.

The limiter blocks in any training loop to keep the ratio of samples to batches. `Monitor` is
the one place where its threads wait, and those of `retrain.trainer.source`.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Generic, TypeVar

import numpy as np

from retrain.base.errors import RetrainError
from retrain.config.flow import FlowSettings, is_count
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


Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class VersionedItem(Generic[Item]):
    """An item with the policy version that sampled it."""

    item: Item
    version: int


class Buffer(Generic[Item]):
    """Samples until they are read, or longer.

    A fifo reads each once, in order of arrival. A firo reads each once, in random order, and leaves at least
    `threshold` to draw from later. A reservoir reads at random and keeps what it reads; when it is full, it
    makes room by evicting a sample that was already read. The samples of one batch differ. The random
    generator's state is part of the checkpoint; samples are not.

    Source: Meyer et al., "High Throughput Training of Deep Surrogates from Large Ensemble Runs", SC 2023,
    arXiv:2309.16743.
    """

    def __init__(self, settings: FlowSettings, seed: int = 0) -> None:
        self._capacity, self._threshold = settings.capacity, settings.threshold
        self._is_random, self._keeps = settings.buffer != "fifo", settings.buffer == "reservoir"
        self._rng = np.random.default_rng(seed)
        self._unseen: list[VersionedItem[Item]] = []
        self._seen: list[VersionedItem[Item]] = []

    def __len__(self) -> int:
        return len(self._unseen) + len(self._seen)

    @property
    def unseen(self) -> int:
        return len(self._unseen)

    def versions(self) -> list[int]:
        return [sample.version for sample in self._unseen]

    @property
    def has_room(self) -> bool:
        return len(self._unseen) < self._capacity

    def needed(self, batch_size: int) -> int:
        """Return how many samples it must hold before a batch may be read."""
        return batch_size + self._threshold

    def put(self, sample: VersionedItem[Item]) -> None:
        """Take in a sample; there must be room."""
        if not self.has_room:
            raise OverflowError("the buffer is full; ask has_room before putting a sample")
        if len(self) >= self._capacity:
            self._pop_random(self._seen)
        self._unseen.append(sample)

    def take(self, batch_size: int, *, oldest: int = 0) -> list[VersionedItem[Item]]:
        """Read a batch of different samples.

        `oldest` is how many of the oldest unread samples it must hold: they would be stale for the next.
        """
        in_order = oldest if self._is_random else batch_size
        if self._is_random and oldest:
            self._unseen.sort(key=lambda sample: sample.version)
        taken, self._unseen = self._unseen[:in_order], self._unseen[in_order:]
        taken += [self._draw() for _ in range(batch_size - len(taken))]
        if self._keeps:
            self._seen += taken
        return taken

    def drop_older_than(self, version: int) -> list[VersionedItem[Item]]:
        """Remove samples of earlier policy versions; return those of them that were never read."""
        dropped = [sample for sample in self._unseen if sample.version < version]
        self._unseen = [sample for sample in self._unseen if sample.version >= version]
        self._seen = [sample for sample in self._seen if sample.version >= version]
        return dropped

    def state_dict(self) -> StateDict:
        return {"rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: StateDict) -> None:
        self._rng.bit_generator.state = state["rng"]

    def _draw(self) -> VersionedItem[Item]:
        is_unseen = not self._keeps or self._rng.integers(len(self)) < len(self._unseen)
        return self._pop_random(self._unseen if is_unseen else self._seen)

    def _pop_random(self, samples: list[VersionedItem[Item]]) -> VersionedItem[Item]:
        """Remove one at random in constant time: the last one takes its place."""
        i = int(self._rng.integers(len(samples)))
        samples[i], samples[-1] = samples[-1], samples[i]
        return samples.pop()


@dataclass(eq=False, slots=True)
class Unit(Generic[Item]):
    """A production unit that is being sampled or waits to enter the buffer."""

    version: int
    expected: int  # samples
    items: deque[Item] | None = None  # None until it arrives

    @property
    def samples(self) -> int:
        return self.expected if self.items is None else len(self.items)


class Flow(Generic[Item]):
    """Decides what may happen next between production and training; settings that could deadlock are refused.

    It combines the pace, the buffer and policy versions. A producer checks `may_start`, starts a unit,
    samples, and delivers it (`arrive`). The trainer requests a batch (`ask`), waits for `may_take`, takes it,
    updates the policy and publishes its version. Units enter the buffer in the order in which they were
    started, whichever is finished first: training waits for a slow unit rather than overtake it until it is
    stale, so it sees the lengths and prompts sampled. Nothing is started that the run's last batch leaves
    over, nor, while the flow is held, that the requested batch does not need.

    There is no deadlock: once a batch is requested, production is never held back while the buffer cannot
    serve it, and the batch is never held back while nothing can come in.
    """

    def __init__(self, settings: FlowSettings, seed: int = 0) -> None:
        """Open an empty buffer; `seed` is for its random reads."""
        if problems := [f"{key}: {what}" for key, what in settings.conflicts()]:
            raise ValueError("\n".join(problems))
        self.settings = settings
        self.buffer: Buffer[Item] = Buffer(settings, seed)
        self.account = RateAccount(settings.samples_per_batch, settings.watermark)
        self.steps = settings.steps  # after which no batch is taken, unless it is requested
        self.version = 0  # policy version last published
        self.asked = settings.batch_size  # samples in the batch requested last
        self.is_asked = False  # between a request and its batch
        self.is_training = False  # between a batch and its update
        self.is_held = False  # start only what a requested batch needs
        self.units = 0  # production units that arrived
        self.batches = 0
        self.stale = 0  # samples dropped because of their age
        self.just_dropped: list[Item] = []  # those dropped since the last batch
        self.lost = 0  # samples under way when a process ended
        self.under_way: deque[Unit[Item]] = deque()  # in starting order

    @property
    def in_flight(self) -> int:
        """Samples being produced or waiting to enter the buffer."""
        return sum(unit.samples for unit in self.under_way)

    @property
    def ahead(self) -> int:
        """Samples not yet trained on, in the buffer or in flight."""
        return self.buffer.unseen + self.in_flight

    def may_start(self) -> bool:
        """Whether a unit started now would be fresh when its turn comes, or is needed now.

        The bound is that of AReaL, arXiv:2505.24298, section 5.1, counted in samples.
        """
        if self.under_way and self.under_way[0].items is not None:
            return False  # even this finished unit has no room yet, or comes too early
        staleness = self.settings.max_staleness
        if staleness is None:
            waiting = sum(unit.samples for unit in self.under_way if unit.items is not None)
            return waiting < self.settings.capacity
        if not (left := self._batches_left()):
            return False
        batches_in_time = min(staleness + 1 - self.is_training, left)
        is_fresh = self.ahead + self.settings.unit_size <= self.asked * batches_in_time
        is_free = self.is_asked if self.is_held else not self.is_training
        if is_fresh and not self.is_held:
            return True
        # whether a waiting trainer would wait forever, or needlessly long, without another unit
        is_idle = self.in_flight == 0 and not self.may_take()
        return is_free and (is_idle or len(self.buffer) + self.in_flight < self._needed())

    def most_started(self, batches: int, *, held: bool) -> float:
        """Return how many samples can at most come in until so many more batches (0 or 1) are trained on.

        It counts those being sampled, and those that may be started before the next batch is requested.
        """
        unit_size, share = self.settings.unit_size, self.asked / self.settings.batch_size
        sampling = sum(unit.expected for unit in self.under_way if unit.items is None)
        left, needed = self._batches_left(), self._needed()
        lacking = max(needed - len(self.buffer), self.account.lacking(share)) - self.in_flight
        soon = sampling
        if lacking > 0 and left > 0 and (batches > 0 or not held):
            soon += unit_size * math.ceil(lacking / unit_size)
        if held or left < batches:
            return soon
        staleness = self.settings.max_staleness
        in_time = math.inf if staleness is None else staleness + 1
        ahead = (
            max(self.asked * min(in_time, left - batches), needed + unit_size - 1) if left > batches else 0
        )
        return max(soon, self.asked * batches + ahead - (self.ahead - sampling))

    def start(self) -> Unit[Item]:
        unit: Unit[Item] = Unit(self.version, self.settings.unit_size)
        self.under_way.append(unit)
        return unit

    def arrive(self, unit: Unit[Item], items: Iterable[Item], version: int) -> None:
        """Accept the samples of a unit, sampled with this policy version."""
        unit.items, unit.version = deque(items), version
        self.units += 1
        self._let_in()

    def ask(self, samples: int, version: int) -> None:
        """Request a batch for this policy version; drop the samples that are stale for it.

        For the pace, a batch of another size than the nominal one counts in proportion.

        Raises:
            ValueError: the buffer can never hold such a batch.
        """
        largest = self.settings.capacity - self.settings.threshold
        if not 1 <= samples <= largest:
            raise ValueError(f"a batch of {samples} samples: needs 1 to capacity - threshold = {largest}")
        self.asked, self.is_asked = samples, True
        self.publish(version)

    def may_take(self) -> bool:
        share = self.asked / self.settings.batch_size
        return self._can_serve() and self.account.may_consume(share, full=not self.buffer.has_room)

    def take(self) -> list[VersionedItem[Item]]:
        self.account.take(self.asked / self.settings.batch_size)
        self.batches += 1
        self.is_asked, self.is_training = False, True
        taken = self.buffer.take(self.asked, oldest=self._due())
        self._let_in()
        return taken

    def publish(self, version: int) -> None:
        """Record the policy's version after an update, and drop stale samples."""
        self.version = max(self.version, version)
        self.is_training = False
        if self.settings.max_staleness is not None:
            old = self.buffer.drop_older_than(self.version - self.settings.max_staleness)
            self._drop([sample.item for sample in old])
        self._let_in()

    def state_dict(self) -> StateDict:
        """Return counts and generators, JSON-able; samples under way count as lost and are not saved."""
        return {
            "account": self.account.state_dict(),
            "buffer": self.buffer.state_dict(),
            "version": self.version,
            "units": self.units,
            "batches": self.batches,
            "stale": self.stale,
            "lost": self.lost + self.ahead,
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Restore what `state_dict` returned, with nothing under way: the watermark applies again."""
        self.account.load_state_dict(state["account"])
        self.account.restart()
        self.buffer.drop_older_than(self.version + 1)  # all
        self.under_way, self.just_dropped = deque(), []
        self.is_asked = self.is_training = False
        self.buffer.load_state_dict(state["buffer"])
        for key in ("version", "units", "batches", "stale", "lost"):
            setattr(self, key, state[key])

    def _let_in(self) -> None:
        """Move samples of finished units into the buffer, oldest unit first, while there is room."""
        oldest, share = self.settings.max_staleness, self.asked / self.settings.batch_size
        while self.under_way and (unit := self.under_way[0]).items is not None:
            while unit.items:
                is_stale = oldest is not None and self.version - unit.version > oldest
                may_produce = self.account.may_produce(asked=share, starved=not self._can_serve())
                if not is_stale and not (self.buffer.has_room and may_produce):
                    return
                self.account.add(1)
                if is_stale:
                    self._drop([unit.items.popleft()])
                else:
                    self.buffer.put(VersionedItem(unit.items.popleft(), unit.version))
            self.under_way.popleft()

    def _needed(self) -> int:
        """Return how many samples the buffer must hold before the batch may be read."""
        return max(self.buffer.needed(self.asked), 0 if self.account.started else self.settings.watermark)

    def _batches_left(self) -> float:
        """Return how many batches are still to be taken; infinitely many without an end."""
        left = math.inf if self.steps is None else self.steps - self.version - self.is_training
        return max(left, int(self.is_asked))

    def _can_serve(self) -> bool:
        return len(self.buffer) >= self.buffer.needed(self.asked)

    def _due(self) -> int:
        """Return how many of the oldest unread samples this batch must hold so that none becomes stale.

        No more samples of a version, and of those before it, may be left over than fit into the batches that
        can still use them.
        """
        oldest = self.settings.max_staleness
        if oldest is None:
            return 0
        waiting = sorted(
            [*self.buffer.versions(), *(u.version for u in self.under_way for _ in range(u.samples))]
        )
        left = [
            number - self.asked * max(0, version + oldest - self.version)
            for number, version in enumerate(waiting, start=1)
        ]
        return min(self.asked, max([0, *left]))

    def _drop(self, items: list[Item]) -> None:
        self.stale += len(items)
        self.just_dropped += items
        self.account.discard(len(items))
